"""Linear layers: packed, quantized, batch-invariant, and their kernels."""
