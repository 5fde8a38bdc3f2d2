"""Prompts that prefill replicas read: the placement decision, the orders, the blocks that come back."""
