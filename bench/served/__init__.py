"""Benchmarks of the served application, over HTTP."""
