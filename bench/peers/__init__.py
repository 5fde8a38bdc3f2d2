"""`make bench-peers`: other servers of the same pair against this one, in one run (docs/benchmarks.md)."""
