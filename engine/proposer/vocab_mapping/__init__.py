"""Drafts of a model whose tokenizer is not the target's (arXiv:2502.05202); the engine sees the target's ids alone."""
