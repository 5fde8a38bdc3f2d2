"""A pass's input: drafts, spans of sequences, and fast indices for tensors."""
