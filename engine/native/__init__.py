"""Kernels for processors in C, and their loader."""
