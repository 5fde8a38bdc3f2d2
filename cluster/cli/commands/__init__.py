"""The commands of `outrider`, each a function in a file of its own whose parameters are typer's."""
