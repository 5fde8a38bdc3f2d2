"""The command line: the commands of `outrider`, joined in `__main__.py`, and their output.

It goes to the terminal, without colours and in whole lines if that is a file or a pipe, and to files.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from protos.errors import ConfigError

Number = TypeVar("Number", int, float)

console = Console(highlight=False, soft_wrap=True, width=None if os.isatty(1) else 1000)  # a table cuts to the width
_errors = Console(stderr=True, highlight=False, soft_wrap=True)


def report(text: str) -> None:
    """Print a line of progress, without markup."""
    console.print(text, markup=False)


def report_error(error: Exception) -> None:
    """Print an error on stderr."""
    _errors.print(f"\nerror: {error}", markup=False)


def numbers_in(text: str, option: str, kind: Callable[[str], Number], advice: str) -> tuple[Number, ...]:
    """Return the numbers of an option, separated by commas. Raises ConfigError."""
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError as error:
        name = "whole number" if kind is int else "number"
        raise ConfigError(f"{option} {text!r} has a value that is not a {name}; {advice}") from error


def write_text(file: Path, text: str, option: str) -> None:
    """Write the file of an option. Raises ConfigError if that fails."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {file} cannot be written: {error}") from None
