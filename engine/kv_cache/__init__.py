"""KV blocks: the block tables (logical) and the tensors that store them (physical)."""
