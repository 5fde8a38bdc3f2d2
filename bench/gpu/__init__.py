"""`python -m bench.gpu`: the cost of decoding on this GPU, in one table."""
