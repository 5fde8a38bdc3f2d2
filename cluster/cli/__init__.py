"""The command line: the commands of `outrider`, joined in `__main__.py`, and their shared parts."""
