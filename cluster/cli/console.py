"""The terminal: plain text if the output is a file or a pipe."""

from __future__ import annotations

from rich.console import Console

console = Console(highlight=False, soft_wrap=True)
_errors = Console(stderr=True, highlight=False, soft_wrap=True)


def report(text: str) -> None:
    """Print a line of progress, without markup."""
    console.print(text, markup=False)


def report_error(error: Exception) -> None:
    """Print an error on stderr."""
    _errors.print(f"\nerror: {error}", markup=False)
