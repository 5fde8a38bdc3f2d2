"""Checkpoints as people have them: GGUF files, and weights in GPTQ, AWQ, FP8 and compressed-tensors."""
