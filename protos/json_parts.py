"""The number of things in a large JSON text, counted before one of them is made."""

from __future__ import annotations

import numpy as np

from protos.errors import RequestError

LARGE_BYTES = 1 << 16  # shorter texts hold so little that they are not counted
_MAX_PARTS = 1 << 16
_MAX_VALUES = 1_250_000  # a context of a million tokens in ids, and the rest of a request
_QUOTE, _COMMA = ord('"'), ord(",")


def check_parts(text: bytes | bytearray, name: str) -> None:
    """Raise RequestError for a large text of more things than a request needs; what is no JSON may pass.

    Lists, objects, their fields and texts each cost an allocation or more to read, and numbers a tenth of it. `name` is
    that of the text for the client.
    """
    if len(text) <= LARGE_BYTES:
        return
    octets = np.frombuffer(_without_escapes(bytes(text)), np.uint8)
    is_outside = ~np.logical_xor.accumulate(octets == _QUOTE)  # of texts; what ends one is
    num_values = 1 + np.count_nonzero(is_outside & (octets == _COMMA))
    if num_values > _MAX_VALUES:
        raise RequestError(f"{name} holds {num_values} values; at most {_MAX_VALUES} are read.")
    num_parts = sum(np.count_nonzero(is_outside & (octets == ord(mark))) for mark in '[{:"')
    if num_parts > _MAX_PARTS:
        raise RequestError(f"{name} holds {num_parts} lists, objects, fields and texts; at most {_MAX_PARTS} are read.")


def _without_escapes(text: bytes) -> bytes:
    """Return the text with blanks for the escapes of backslashes and quotes, so that every quote bounds a text."""
    return text.replace(rb"\\", b"  ").replace(rb"\"", b"  ")
