"""`python -m bench.speculation`: every way to speculate, and the studies of single methods."""
