"""The end of a JSON object in a text that is still being written."""

from __future__ import annotations


class JsonExtent:
    """Follows one object from its opening brace, piece by piece, without parsing its content."""

    def __init__(self) -> None:
        self._depth = 0
        self._is_in_string = False
        self._is_escaped = False

    def feed(self, text: str) -> int | None:
        """Return the number of characters of `text` up to the end of the object; None if it continues beyond `text`."""
        for index, character in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_in_string:
                self._is_escaped = character == "\\"
                self._is_in_string = character != '"'
            else:
                self._is_in_string = character == '"'
                self._depth += (character in "{[") - (character in "}]")
                if self._depth == 0:
                    return index + 1
        return None
