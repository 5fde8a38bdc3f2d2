"""KV blocks: which block holds what (logical), and the tensors they lie in (physical)."""
