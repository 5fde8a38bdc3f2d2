"""The index actor: what every pair holds and does, shared by all ingress replicas."""
