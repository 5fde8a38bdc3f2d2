"""The command line: the commands of `outrider`, joined in `__main__.py`, and the parts that several of them use."""
