"""Parses tool calls from a text that is still growing, as early as content and calls can be distinguished."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import Enum, auto

from protos.messages import FinishReason
from router.generation.delta import Delta, Gain, ToolCallDelta, split_delta
from router.generation.tool_formats.argument_value import arguments_in
from router.generation.tool_formats.tool_format import LONGEST_HEAD, BodyReader, ToolFormat, num_held
from router.generation.tool_formats.whole_format import BracketExtent

_NOTHING = Gain()


class _State(Enum):
    TEXT = auto()
    HEAD = auto()  # after the beginning of a call, before its arguments
    ARGUMENTS = auto()
    TAIL = auto()  # after the arguments, before the end of the call
    BODY = auto()  # inside a call whose arguments are not written in JSON


class ToolCallParser:
    """Turns the deltas of one choice into content and tool calls.

    Arguments are passed on as they grow, in the text the model wrote. A text that looks like a call but has broken JSON
    or an unknown function stays content.
    """

    def __init__(self, format_: ToolFormat, tools: Mapping[str, object], *, has_calls_alone: bool = False) -> None:
        """`tools` are the schemas of the arguments by the functions' names.

        With `has_calls_alone` a grammar allows no content: other text is the beginning of a call that the end cut off,
        and is dropped.
        """
        self._has_calls_alone = has_calls_alone
        self._format = format_
        self._tools = tools
        self._body: BodyReader | None = None
        self._mark = ""  # the beginning of the call that is read, with the white space before it
        self._has_begun = False  # a call has been shown of the body that is read
        self._head = format_.head_pattern
        self._state = _State.TEXT
        self._held = ""  # not yet classified as content or call
        self._extent = BracketExtent('"')
        self._num_calls = 0
        self._has_content = False

    def read(self, delta: Delta) -> list[Delta]:
        """Split a delta's text into parts; a stop after complete calls becomes the finish reason `tool_calls`."""
        gains = self._feed(delta.text)
        if delta.finish_reason is not None:
            gains.append(self._flush(delta.finish_reason))
        reason = delta.finish_reason
        is_whole = self._state is not _State.ARGUMENTS and not (self._state is _State.BODY and self._has_begun)
        if reason is FinishReason.STOP and self._num_calls and is_whole:
            reason = FinishReason.TOOL_CALLS
        return split_delta(delta, gains, reason)

    def _feed(self, text: str) -> list[Gain]:
        self._held += text
        gains = []
        while (gain := self._advance()) is not None:
            gains.append(gain)
        return gains

    def _advance(self) -> Gain | None:
        """Take one part off the held text; None when more text is needed."""
        match self._state:
            case _State.TEXT:
                return self._read_text() if self._format.begin else self._read_bare_text()
            case _State.HEAD:
                return self._read_head()
            case _State.ARGUMENTS:
                return self._read_arguments()
            case _State.TAIL:
                return self._read_tail()
            case _State.BODY:
                return self._read_body()

    def _read_text(self) -> Gain | None:
        marks = [mark for mark in (self._format.begin, *self._format.strays, self._format.bare_begin) if mark]
        places = [(place, mark) for mark in marks if (place := self._held.find(mark)) >= 0]
        if places:
            place, mark = min(places)
            before, self._held = self._held[:place], self._held[place + len(mark) :]
            shown = before.rstrip()
            if mark in (self._format.begin, self._format.bare_begin):
                self._begin_call(mark)
                self._mark = before[len(shown) :] + mark
            return self._content(shown)
        num_shown = len(self._held) - max(num_held(self._held, mark) for mark in marks)
        text, self._held = self._held[:num_shown], self._held[num_shown:]
        return self._content(text) if num_shown else None

    def _begin_call(self, mark: str) -> None:
        self._mark, self._has_begun = mark, False
        self._body = self._format.body(self._tools, has_begin=mark == self._format.begin)
        self._state = _State.HEAD if self._body is None else _State.BODY

    def _read_body(self) -> Gain | None:
        assert self._body is not None
        step = self._body(self._held)
        if step is None:
            return None
        if step.is_done:
            self._state = _State.TEXT
        read, self._held = self._held[: step.num_characters], self._held[step.num_characters :]
        if not step.is_call:
            return self._content(self._mark + read)
        self._has_begun |= bool(step.pieces)
        return Gain(calls=tuple(each for piece in step.pieces for each in self._piece(*piece)))

    def _piece(self, arguments: str, name: str | None) -> tuple[ToolCallDelta, ...]:
        if name is None:
            return (ToolCallDelta(self._num_calls - 1, arguments=arguments),)
        return self._new_call(name, arguments).calls

    def _read_bare_text(self) -> Gain | None:
        """Read text up to a call without a mark, which comes first in the answer or follows another call."""
        start = self._held.lstrip(" \r\n\t;" if self._num_calls else None)
        if not start:
            return None
        if start[0] == self._format.opening and not self._has_content:
            self._held = start
            self._begin_call(self._format.begin)
            self._extent = BracketExtent('"')
            return _NOTHING
        text, self._held = self._held, ""
        return self._content(text)

    def _read_head(self) -> Gain | None:
        head = self._head.match(self._held)
        if head is not None and (name := self._tool_name(self._name_in(head[1]))) is not None:
            self._state, self._held = _State.ARGUMENTS, self._held[head.end() :]
            self._extent = BracketExtent('"')
            return self._new_call(name, "", self._format.call_id(head))
        end = self._end_of_call()
        return None if end is None else self._read_whole_call(end)

    def _read_whole_call(self, end: int) -> Gain:
        """Take a complete body: a call whose fields are in another order, or else content."""
        body, self._held = self._held[:end], self._held[end + len(self._format.end) :]
        self._state = _State.TEXT
        return self._whole_call(body) or self._content(self._mark + body + self._format.end)

    def _whole_call(self, body: str) -> Gain | None:
        """Return the call in a complete body, with or without arguments; None if it is no call."""
        key = self._format.arguments_key
        if not key:
            head = self._format.bare_head_pattern.fullmatch(body)
            return None if head is None else self._new_call(head[1], "{}", self._format.call_id(head))
        parsed = _parse(body)
        call = parsed if isinstance(parsed, dict) else {}
        name, arguments = self._tool_name(call.get("name")), arguments_in(call.get(key))
        is_call = bool(self._format.begin) or key in call or len(call) == 1
        if name is None or arguments is None or not is_call:
            return None
        return self._new_call(name, json.dumps(arguments, ensure_ascii=False))

    def _read_arguments(self) -> Gain | None:
        if not self._held:
            return None
        end = self._extent.feed(self._held)
        fragment = self._held[:end]
        self._held = "" if end is None else self._held[end:]
        self._state = _State.ARGUMENTS if end is None else _State.TAIL
        return Gain(calls=(ToolCallDelta(self._num_calls - 1, arguments=fragment),))

    def _name_in(self, head: str) -> object:
        return _parse(head) if self._format.arguments_key else head

    def _read_tail(self) -> Gain | None:
        end = self._format.end or ("}" if self._format.arguments_key else "")
        if not end:
            self._state = _State.TEXT
            return _NOTHING
        _, found, after = self._held.partition(end)
        if not found:
            return None
        self._state, self._held = _State.TEXT, after
        return _NOTHING

    def _flush(self, reason: FinishReason) -> Gain:
        """Return the rest at the end of the text; a call whose arguments have begun is not taken back."""
        held, self._held = self._held, ""
        if self._state is _State.TEXT:
            return self._content(held if self._num_calls == 0 else held.rstrip())
        if self._state is _State.HEAD and reason is FinishReason.STOP and (call := self._whole_call(held)) is not None:
            self._state = _State.TEXT
            return call
        is_call = self._has_begun or self._state not in (_State.HEAD, _State.BODY)
        return _NOTHING if is_call else self._content(self._mark + held)

    def _content(self, text: str) -> Gain:
        """Return text as content, without white space around calls."""
        if self._has_calls_alone:
            return _NOTHING
        if self._num_calls and not self._has_content:
            text = text.lstrip()
        self._has_content |= bool(text)
        return Gain(text)

    def _new_call(self, name: str, arguments: str, call_id: str | None = None) -> Gain:
        self._num_calls += 1
        id_ = self._format.new_call_id() if call_id is None else call_id
        return Gain(calls=(ToolCallDelta(self._num_calls - 1, id_, name, arguments),))

    def _tool_name(self, name: object) -> str | None:
        """Return the name of a call. A bare object may be an answer, so there it must be a tool's name."""
        is_tool = isinstance(name, str) and (bool(self._format.begin) or name in self._tools)
        return str(name) if is_tool else None

    def _end_of_call(self) -> int | None:
        """Return the end of the buffered call's body; None if it has not arrived."""
        if not self._format.end and not self._format.arguments_key:
            if (place := self._held.find(self._format.begin)) >= 0:
                return place
            return len(self._held) if len(self._held) > LONGEST_HEAD else None
        if not self._format.end:
            return self._extent.end_in(self._held)
        index = self._held.find(self._format.end)
        return None if index < 0 else index


def _parse(text: str) -> object:
    """Return the value of a JSON text; None if it is no JSON or holds a lone surrogate, which cannot be sent."""
    try:
        value: object = json.loads(text)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return value
