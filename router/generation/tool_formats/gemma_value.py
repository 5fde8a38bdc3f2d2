"""Calls as Gemma writes them: JSON with bare keys, and with a mark of its own in place of quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from router.requests.tools import NAME_PATTERN

_HEAD = re.compile(rf"\s*call:\s*({NAME_PATTERN})\s*(?=\{{|$)")
_KEY = re.compile(r'\s*([^\s:{}\[\],"<]+)\s*:')
_BARE = re.compile(r"[^,{}\[\]]*")
_MAX_DEPTH = 64


def read_gemma_call(text: str, quote: str) -> list[tuple[str, Mapping[str, object]]]:
    """Return the call in `text`. Raises ValueError for any other text."""
    head = _HEAD.match(text)
    if head is None:
        raise ValueError("it has no head")
    if head.end() == len(text):
        return [(head[1], {})]
    reader = _ValueParser(text, head.end(), quote)
    arguments = reader.value(0)
    if not isinstance(arguments, dict) or text[reader.place :].strip():
        raise ValueError("something follows the arguments")
    return [(head[1], arguments)]


class _ValueParser:
    """Reads one value after another from a text."""

    def __init__(self, text: str, place: int, quote: str) -> None:
        self.place = place
        self._text = text
        self._quote = quote

    def value(self, depth: int) -> object:
        if depth > _MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        self._skip()
        if self._takes("{"):
            return self._object(depth)
        if self._takes("["):
            return self._items(depth)
        if self._text.startswith((self._quote, '"'), self.place):
            return self._quoted()
        return self._bare()

    def _object(self, depth: int) -> dict[str, object]:
        entries: dict[str, object] = {}
        while not self._ends("}"):
            name = self._name()
            entries[name] = self.value(depth + 1)
            self._comma()
        return entries

    def _items(self, depth: int) -> list[object]:
        items = []
        while not self._ends("]"):
            items.append(self.value(depth + 1))
            self._comma()
        return items

    def _name(self) -> str:
        self._skip()
        if self._text.startswith((self._quote, '"'), self.place):
            name = self._quoted()
            self._skip()
            if not self._takes(":"):
                raise ValueError("a name has no colon")
            return name
        key = _KEY.match(self._text, self.place)
        if key is None:
            raise ValueError("a name is missing")
        self.place = key.end()
        return key[1]

    def _quoted(self) -> str:
        if self._takes(self._quote):
            end = self._text.index(self._quote, self.place)
            text, self.place = self._text[self.place : end], end + len(self._quote)
            return text
        value, self.place = json.JSONDecoder().raw_decode(self._text, self.place)
        return str(value)

    def _bare(self) -> object:
        bare = _BARE.match(self._text, self.place)
        word = bare[0].strip() if bare else ""
        if not word:
            raise ValueError("a value is missing")
        self.place += len(bare[0]) if bare else 0
        try:
            value: object = json.loads(word)
        except ValueError:
            return word
        return value

    def _ends(self, bracket: str) -> bool:
        self._skip()
        if self.place >= len(self._text):
            raise ValueError("a bracket is missing")
        return self._takes(bracket)

    def _comma(self) -> None:
        self._skip()
        if not self._takes(",") and self._text[self.place : self.place + 1] not in ("}", "]"):
            raise ValueError("a comma is missing")

    def _skip(self) -> None:
        while self._text[self.place : self.place + 1].isspace():
            self.place += 1

    def _takes(self, mark: str) -> bool:
        is_next = self._text.startswith(mark, self.place)
        self.place += len(mark) if is_next else 0
        return is_next
