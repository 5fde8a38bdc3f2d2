"""Client text: limits of its JSON, and a form that is safe for logs and traces: one line, and short.

Names, fields and headers of a request may be long or hold line breaks that forge log lines. Log records are cleaned
where they are made, so no caller can forget it.
"""

from __future__ import annotations

import logging
import traceback
from typing import Any

import numpy as np

from protos.errors import RequestError

MAX_PARTS = 1 << 16
_MAX_VALUES = 1_250_000  # a context of a million tokens in ids, and the rest of a request
_MAX_MESSAGE = 1500
_QUOTE, _COMMA = ord('"'), ord(",")


def check_parts(text: bytes | bytearray, name: str) -> None:
    """Raise RequestError if a large text has more values than any request needs; invalid JSON may pass.

    Each list, object, field and string costs at least one allocation to parse, a number a tenth of that. `name` is the
    client's name for the text.
    """
    if len(text) <= MAX_PARTS:  # each part takes a byte at least
        return
    octets = np.frombuffer(_without_escapes(bytes(text)), np.uint8)
    is_outside = ~np.logical_xor.accumulate(octets == _QUOTE)  # of strings; a closing quote counts
    num_values = 1 + np.count_nonzero(is_outside & (octets == _COMMA))
    if num_values > _MAX_VALUES:
        raise RequestError(f"{name} holds {num_values} values; at most {_MAX_VALUES} are read.")
    num_parts = sum(np.count_nonzero(is_outside & (octets == ord(mark))) for mark in '[{:"')
    if num_parts > MAX_PARTS:
        raise RequestError(f"{name} holds {num_parts} lists, objects, fields and texts; at most {MAX_PARTS} are read.")


def _without_escapes(text: bytes) -> bytes:
    """Blank out escaped backslashes and quotes, so that every remaining quote bounds a string."""
    return text.replace(rb"\\", b"  ").replace(rb"\"", b"  ")


def for_log(value: object, limit: int = 200) -> str:
    """Return the start of a value as text without line breaks, control characters and lone surrogates."""
    text = str(value)
    shown = text[:limit]
    if not (shown.isascii() and shown.isprintable()):
        shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in shown)[
            :limit
        ]
    return shown if len(text) <= limit else f"{shown}... ({len(text)} characters)"


class LogLine(logging.LogRecord):
    """A log record with a one-line message and one line per error of its traceback.

    It holds for every logger: Serve logs errors of a pair, and gRPC errors of a method.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if self.exc_info and self.exc_info[1] is not None:
            self.exc_text = _one_line_each(self.exc_info[1])

    def getMessage(self) -> str:  # noqa: N802  # logging's own name
        return for_log(super().getMessage(), _MAX_MESSAGE)


def guard_logs() -> None:
    """Make this process create its log records as `LogLine`; idempotent."""
    logging.setLogRecordFactory(LogLine)


def _one_line_each(error: BaseException) -> str:
    """Return the traceback of an error and of its causes."""
    parts, seen = [], set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        frames = "".join(traceback.format_tb(each.__traceback__))
        parts.append(
            f"Traceback (most recent call last):\n{frames}{type(each).__name__}: {for_log(each, _MAX_MESSAGE)}"
        )
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)
    return "\n\nwhich followed:\n\n".join(parts)
