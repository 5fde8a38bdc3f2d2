"""`python -m bench.gpu`: what decoding costs on this GPU, in one table."""
