"""A limit on the number of values in a large JSON text, checked before it is parsed."""

from __future__ import annotations

import numpy as np

from protos.errors import RequestError

LARGE_BYTES = 1 << 16  # shorter texts hold too few values to count
_MAX_PARTS = 1 << 16
_MAX_VALUES = 1_250_000  # a context of a million tokens in ids, and the rest of a request
_QUOTE, _COMMA = ord('"'), ord(",")


def check_parts(text: bytes | bytearray, name: str) -> None:
    """Raise RequestError if a large text has more values than any request needs; invalid JSON may pass.

    Each list, object, field and string costs at least one allocation to parse, a number a tenth of that. `name` is the
    client's name for the text.
    """
    if len(text) <= LARGE_BYTES:
        return
    octets = np.frombuffer(_without_escapes(bytes(text)), np.uint8)
    is_outside = ~np.logical_xor.accumulate(octets == _QUOTE)  # of strings; a closing quote counts
    num_values = 1 + np.count_nonzero(is_outside & (octets == _COMMA))
    if num_values > _MAX_VALUES:
        raise RequestError(f"{name} holds {num_values} values; at most {_MAX_VALUES} are read.")
    num_parts = sum(np.count_nonzero(is_outside & (octets == ord(mark))) for mark in '[{:"')
    if num_parts > _MAX_PARTS:
        raise RequestError(f"{name} holds {num_parts} lists, objects, fields and texts; at most {_MAX_PARTS} are read.")


def _without_escapes(text: bytes) -> bytes:
    """Blank out escaped backslashes and quotes, so that every remaining quote bounds a string."""
    return text.replace(rb"\\", b"  ").replace(rb"\"", b"  ")
