"""Growing drafts: chains and trees, and the choice of their tokens."""
