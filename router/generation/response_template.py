"""Answers parsed by the tokenizer's own response template, with transformers' parser.

The fallback for models whose calls match no format of `tool_formats`. This module loads transformers.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from transformers.utils.chat_parsing import ResponseParser
from transformers.utils.chat_parsing.response_templates import load_response_template

from protos.errors import ConfigError
from protos.messages import FinishReason
from router.generation.choice_text import Trimmed
from router.generation.delta import Delta, Gain, ToolCallDelta, split_delta

_CALLS, _TEXT = "tool_calls", "content"  # names of regions; of a thought there are several


def load_template(spec: Mapping[str, object]) -> Any:
    """Return a tokenizer's response template, checked and compiled.

    Raises:
        ConfigError: it is not of the form that the installed transformers reads.
    """
    try:
        return load_response_template(dict(spec))
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"response_template of the model's tokenizer_config.json cannot be used: {error}") from error


class ResponseReader:
    """Turns the deltas of one choice into text, thoughts and calls.

    A call is passed on when it is complete; if it cannot be parsed, it stays text. Characters are fed one by one, so
    the result does not depend on how the text is split into pieces.
    """

    def __init__(self, template: Any, prompt: str, tools: Mapping[str, object]) -> None:
        """`prompt` may have begun the answer, `tools` are the schemas of arguments by name."""
        self._template = template
        self._tools: list[Any] = [{"function": {"name": name, "parameters": tools[name]}} for name in tools]
        self._parser = ResponseParser(template, prompt, tools=self._tools)
        self._raw = ""  # read, and not yet passed on
        self._text, self._thought = Trimmed(), Trimmed()
        self._num_calls = 0

    def read(self, delta: Delta) -> list[Delta]:
        """Split a delta's text into parts; a stop after complete calls becomes the finish reason `tool_calls`."""
        gains = [self._feed(character) for character in delta.text]
        if delta.finish_reason is not None:
            gains.append(self._end())
        has_calls = delta.finish_reason is FinishReason.STOP and self._num_calls > 0
        return split_delta(delta, gains, FinishReason.TOOL_CALLS if has_calls else delta.finish_reason)

    def _feed(self, character: str) -> Gain:
        self._raw += character
        try:
            return self._gain(self._parser.feed(character))
        except (ValueError, KeyError):
            self._parser = ResponseParser(self._template, "", tools=self._tools)
            return self._as_text()

    def _end(self) -> Gain:
        try:
            return self._gain(self._parser.finalize()[1])
        except (ValueError, KeyError):
            return self._as_text()

    def _as_text(self) -> Gain:
        """Pass on what could not be parsed."""
        text, self._raw = self._raw, ""
        return Gain(text=self._text.push(text))

    def _gain(self, events: list[dict[str, Any]]) -> Gain:
        text = thought = ""
        calls: list[ToolCallDelta] = []
        for event in events:
            match event:
                case {"type": "region_chunk", "field": field, "text": piece} if field != _CALLS:
                    self._raw = self._raw[len(piece) :]
                    text += self._text.push(piece) if field == _TEXT else ""
                    thought += self._thought.push(piece) if field != _TEXT else ""
                case {"type": "region_close", "field": field, "value": value} if field == _CALLS:
                    calls += [self._call(each) for each in (value if isinstance(value, list) else [value])]
                    self._raw = ""
                case {"type": "region_open", "field": field} if field != _CALLS:
                    self._raw = ""
        return Gain(text, thought, tuple(calls))

    def _call(self, value: Any) -> ToolCallDelta:
        """Return a call. Raises ValueError or KeyError for any other value."""
        function = value.get("function", value) if isinstance(value, dict) else {}
        name, arguments = function["name"], function.get("arguments", {})
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        arguments.encode()  # a lone surrogate cannot be sent
        self._num_calls += 1
        return ToolCallDelta(self._num_calls - 1, f"call_{uuid.uuid4().hex[:24]}", str(name), arguments)
