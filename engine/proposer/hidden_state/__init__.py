"""Drafts by heads on the target's hidden states."""
