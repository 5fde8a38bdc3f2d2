"""Linear layers: packed, quantized, batch-invariant, and our kernels behind them."""
