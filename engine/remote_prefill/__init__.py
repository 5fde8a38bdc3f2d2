"""Prefill on other replicas: the placement decision, the orders, and the KV blocks that come back."""
