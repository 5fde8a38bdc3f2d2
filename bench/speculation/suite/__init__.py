"""Every way to speculate on the same texts: `python -m bench.speculation`."""
