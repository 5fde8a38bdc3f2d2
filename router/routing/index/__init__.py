"""The index actor: the blocks and the load of every pair, shared by all ingress replicas."""
