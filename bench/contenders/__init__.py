"""The contenders of benchmarks: one class per way to generate."""
