"""A cluster, or one process, on this machine."""
