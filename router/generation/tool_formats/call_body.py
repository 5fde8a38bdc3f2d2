"""The text of a call after its beginning, parsed as it grows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call's arguments, in JSON; one with a name begins a call."""

    arguments: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class BodyStep:
    """A part of the body that has been understood. It ends with the part that is `is_done`.

    `is_call` is false where the body turned out to be no call; then nothing of it has been read.
    """

    num_characters: int
    pieces: tuple[CallPiece, ...] = ()
    is_done: bool = False
    is_call: bool = True


class CallBody(Protocol):
    """Reads one body."""

    def read(self, text: str) -> BodyStep | None:
        """Parse from the end of the last step; None if more text is needed."""
        ...


def num_held(text: str, mark: str) -> int:
    """Return the length of the end of `text` that may belong to `mark`: white space, and a beginning of the mark."""
    length = next(n for n in range(min(len(mark) - 1, len(text)), -1, -1) if text.endswith(mark[:n]))
    rest = text[: len(text) - length]
    return length + len(rest) - len(rest.rstrip())
