"""`python -m bench.speculation`: every way to speculate, against plain decoding."""
