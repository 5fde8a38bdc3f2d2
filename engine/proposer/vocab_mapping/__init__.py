"""Drafts of a model with a different tokenizer (arXiv:2502.05202); the engine only sees the target's ids."""
