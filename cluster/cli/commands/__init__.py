"""The commands of `outrider`: one function per file, with parameters for typer."""
