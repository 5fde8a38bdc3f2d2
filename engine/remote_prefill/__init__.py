"""Prompts that prefill replicas read: the decision, the orders, the blocks that come back."""
