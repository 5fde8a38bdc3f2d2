"""Drafts by a separate model, in step with the target or ahead of it."""
