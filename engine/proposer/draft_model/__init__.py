"""Drafts by a model of its own, in step with the target or ahead of it."""
