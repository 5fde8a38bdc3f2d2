"""Stop strings: the end of a generated text at the client's request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopScan:
    """The outcome of one step: text that may be shown, and the stop string that ended the text, if one did."""

    text: str
    stop_string: str | None = None


class StopStrings:
    """Watches a growing text for the first stop string to be completed; holds back what may become part of one.

    The outcome does not depend on how the text is cut into pieces. Of two stop strings that end at the same character
    the longer one counts.
    """

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = sorted(stop_strings, key=len, reverse=True)
        self._held = ""

    def push(self, piece: str) -> StopScan:
        """Add a piece of text. After a match the text has ended; push nothing more."""
        text = self._held + piece
        match = self._first_completed(text)
        if match is not None:
            self._held = ""
            return StopScan(text[: text.index(match)], match)
        num_shown = len(text) - self._num_held(text)
        self._held = text[num_shown:]
        return StopScan(text[:num_shown])

    def flush(self) -> str:
        """The text held back, once nothing follows it."""
        text, self._held = self._held, ""
        return text

    def _first_completed(self, text: str) -> str | None:
        found = [stop for stop in self._stop_strings if stop in text]
        return min(found, key=lambda stop: text.index(stop) + len(stop), default=None)

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max(map(len, self._stop_strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop_strings):
                return length
        return 0
