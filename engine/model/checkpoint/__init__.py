"""Checkpoints in their published formats: GGUF files, and weights in GPTQ, AWQ, FP8 and compressed-tensors."""
