"""Drafts as they grow: chains and trees, and how their tokens are chosen."""
