"""Answers of `/v1/messages`: blocks of thinking, text and tool use, in full or as Anthropic's events."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from pydantic import BaseModel, ConfigDict

from protos.errors import ServingError
from protos.messages import FinishReason
from router.generation.delta import Delta
from router.openai.errors import anthropic_error_object
from router.openai.response_writer import ResponseWriter

_REASONS = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
}


class MessagesEvent(BaseModel):
    """A body or an event; its fields follow Anthropic's types."""

    model_config = ConfigDict(extra="allow")

    type: str


class MessagesWriter(ResponseWriter):
    """Writes the one choice of a turn; blocks follow one another, and one at a time is open."""

    end = b""

    _rank = -1
    _open: str | None = None  # the type of the block that is open
    _is_started = False
    _last: Delta | None = None

    def full(self, gained: Sequence[Sequence[Delta]]) -> MessagesEvent:
        content: list[dict[str, Any]] = []
        for event in chain.from_iterable(self.chunks(delta) for delta in gained[0]):
            match event.model_extra:
                case {"content_block": block}:
                    content.append({**block, "input": ""} if block["type"] == "tool_use" else block)
                case {"delta": {"type": "input_json_delta", "partial_json": piece}}:
                    content[-1]["input"] += piece
                case {"delta": {"type": "thinking_delta" | "text_delta" as kind} as delta}:
                    name = kind.removesuffix("_delta")
                    content[-1][name] += delta[name]
        for block in content:
            if block["type"] == "tool_use":
                block["input"] = _input(block["input"])
        return MessagesEvent(**self._message(content, self._last))

    def _begin(self, delta: Delta) -> Iterable[MessagesEvent]:
        if not self._is_started:
            self._is_started = True
            yield _event("message_start", message=self._message([], None))

    def _chunks(self, piece: Delta) -> Iterable[MessagesEvent]:
        if piece.reasoning:
            yield from self._gain("thinking", {"type": "thinking_delta", "thinking": piece.reasoning})
        if piece.text:
            yield from self._gain("text", {"type": "text_delta", "text": piece.text})
        for call in piece.tool_calls:
            if call.id is not None:
                yield from self._start({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            if call.arguments:
                yield self._delta({"type": "input_json_delta", "partial_json": call.arguments})
        if piece.finish_reason is not None:
            self._last = piece

    def last_chunks(self) -> Iterable[MessagesEvent]:
        yield from self._stop()
        if self._last is not None:
            yield _event("message_delta", delta=_ending(self._last), usage=self._usage(), **self._signed())
        yield _event("message_stop")

    def event(self, chunk: BaseModel) -> bytes:
        assert isinstance(chunk, MessagesEvent)
        return f"event: {chunk.type}\ndata: {chunk.model_dump_json()}\n\n".encode()

    def error_event(self, error: ServingError) -> bytes:
        return f"event: error\ndata: {json.dumps(anthropic_error_object(error))}\n\n".encode()

    def _message(self, content: list[dict[str, Any]], last: Delta | None) -> dict[str, Any]:
        return {
            "id": f"msg_{self._generation.id.rpartition('-')[2]}",
            "type": "message",
            "role": "assistant",
            "model": self._generation.model_id,
            "content": content,
            **_ending(last),
            "usage": self._usage(),
            **self._mark(),
            **(self._signed() if last is not None else {}),
        }

    def _usage(self) -> dict[str, int]:
        """Return the counts so far; as in Anthropic's API, cached tokens of the prompt are counted apart."""
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens - usage.cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": usage.cached_tokens,
            "output_tokens": usage.completion_tokens,
        }

    def _gain(self, kind: str, delta: dict[str, Any]) -> Iterable[MessagesEvent]:
        if self._open != kind:
            empty = {"type": "text", "text": ""} if kind == "text" else {"type": kind, "thinking": "", "signature": ""}
            yield from self._start(empty)
        yield self._delta(delta)

    def _start(self, block: dict[str, Any]) -> Iterable[MessagesEvent]:
        yield from self._stop()
        self._rank += 1
        self._open = block["type"]
        yield _event("content_block_start", index=self._rank, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> MessagesEvent:
        return _event("content_block_delta", index=self._rank, delta=delta)

    def _stop(self) -> Iterable[MessagesEvent]:
        if self._open is None:
            return
        if self._open == "thinking":  # clients expect a signature; nothing here would check one
            yield self._delta({"type": "signature_delta", "signature": ""})
        self._open = None
        yield _event("content_block_stop", index=self._rank)


def _ending(last: Delta | None) -> dict[str, Any]:
    if last is None or last.finish_reason is None:
        return {"stop_reason": None, "stop_sequence": None}
    reason = "stop_sequence" if last.stop_string is not None else _REASONS[last.finish_reason]
    return {"stop_reason": reason, "stop_sequence": last.stop_string}


def _input(arguments: str) -> dict[str, Any]:
    """Return the arguments of a call as an object; those that the length cut off are no JSON, and empty."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _event(kind: str, **fields: Any) -> MessagesEvent:
    return MessagesEvent(**{"type": kind, **fields})
