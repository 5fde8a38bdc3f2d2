"""The command line: one file for each command of `outrider`, all of them joined in `__main__.py`."""
