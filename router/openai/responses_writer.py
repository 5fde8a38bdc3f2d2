"""Answers of `/v1/responses`: items of reasoning, text and calls, in full or as OpenAI's numbered events."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from protos.errors import ServingError
from protos.messages import FinishReason
from router.generation.delta import Delta
from router.generation.generation import Generation
from router.openai.response_writer import ResponseWriter
from router.openai.responses_request import ResponsesRequest
from router.tokenizer.tokenizer import Tokenizer


class ResponsesEvent(BaseModel):
    """A body or an event; its fields follow OpenAI's types."""

    model_config = ConfigDict(extra="allow")


class ResponsesWriter(ResponseWriter):
    """Writes the one choice of a turn; items follow one another, and the last is open while it grows."""

    end = b""

    def __init__(self, generation: Generation, tokenizer: Tokenizer, body: ResponsesRequest) -> None:
        super().__init__(generation, tokenizer)
        self._body = body
        self._key = generation.id.rpartition("-")[2]
        self._items: list[dict[str, Any]] = []
        self._is_open = False
        self._num_events = 0
        self._reason: FinishReason | None = None

    def full(self, gained: Sequence[Sequence[Delta]]) -> ResponsesEvent:
        for delta in gained[0]:
            deque(self.chunks(delta), maxlen=0)  # items grow as in a stream
        deque(self._close(), maxlen=0)
        return ResponsesEvent(**self._response(self._status))

    def _begin(self, delta: Delta) -> Iterable[ResponsesEvent]:
        if self._num_events == 0:
            yield self._event("response.created", response=self._response("in_progress"))
            yield self._event("response.in_progress", response=self._response("in_progress"))

    def _chunks(self, piece: Delta) -> Iterable[ResponsesEvent]:
        if piece.reasoning:
            yield from self._gain_part("reasoning", piece.reasoning)
        if piece.text:
            yield from self._gain_part("message", piece.text)
        for call in piece.tool_calls:
            if call.id is not None:
                yield from self._close()
                item = {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": ""}
                yield from self._open("fc", item)
            if call.arguments:
                self._items[-1]["arguments"] += call.arguments
                yield self._item_event("response.function_call_arguments.delta", delta=call.arguments)
        self._reason = piece.finish_reason

    def last_chunks(self) -> Iterable[ResponsesEvent]:
        yield from self._close()
        yield self._event(f"response.{self._status}", response=self._response(self._status))

    def event(self, chunk: BaseModel) -> bytes:
        kind = (chunk.model_extra or {})["type"]
        return f"event: {kind}\ndata: {chunk.model_dump_json()}\n\n".encode()

    def error_event(self, error: ServingError) -> bytes:
        failed = {**self._response("failed"), "error": {"code": "server_error", "message": error.message}}
        return self.event(self._event("response.failed", response=failed))

    @property
    def _status(self) -> str:
        return "incomplete" if self._reason is FinishReason.LENGTH else "completed"

    def _gain_part(self, kind: str, text: str) -> Iterable[ResponsesEvent]:
        """Add text to the open item, opening a new one if another kind is open."""
        is_message = kind == "message"
        if not self._is_open or self._items[-1]["type"] != kind:
            yield from self._close()
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            item: dict[str, Any] = {"type": kind, "summary": [], "content": []}
            if is_message:
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                item = {"type": kind, "role": "assistant", "content": []}
            yield from self._open("msg" if is_message else "rs", item)
            self._items[-1]["content"].append(part)
            yield self._part_event("response.content_part.added", part=dict(part))
        self._items[-1]["content"][0]["text"] += text
        logprobs: dict[str, Any] = {"logprobs": []} if is_message else {}
        yield self._part_event(f"response.{_part_name(kind)}.delta", delta=text, **logprobs)

    def _open(self, prefix: str, item: dict[str, Any]) -> Iterable[ResponsesEvent]:
        self._items.append({"id": f"{prefix}_{self._key}_{len(self._items)}", **item, "status": "in_progress"})
        self._is_open = True
        yield self._event(
            "response.output_item.added", output_index=len(self._items) - 1, item=_copied(self._items[-1])
        )

    def _close(self) -> Iterable[ResponsesEvent]:
        if not self._is_open:
            return
        self._is_open = False
        item = self._items[-1]
        item["status"] = "completed" if self._reason is not FinishReason.LENGTH else "incomplete"
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._item_event("response.function_call_arguments.done", **done)
        else:
            [part] = item["content"]
            logprobs: dict[str, Any] = {"logprobs": []} if item["type"] == "message" else {}
            yield self._part_event(f"response.{_part_name(item['type'])}.done", text=part["text"], **logprobs)
            yield self._part_event("response.content_part.done", part=dict(part))
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=_copied(item))

    def _part_event(self, kind: str, **fields: Any) -> ResponsesEvent:
        return self._item_event(kind, content_index=0, **fields)

    def _item_event(self, kind: str, **fields: Any) -> ResponsesEvent:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> ResponsesEvent:
        self._num_events += 1
        return ResponsesEvent(**{"type": kind, "sequence_number": self._num_events - 1, **fields})

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        is_ended = status in ("completed", "incomplete")
        return {
            "id": f"resp_{self._key}",
            "object": "response",
            "created_at": self._generation.created_s,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._generation.model_id,
            "output": [_copied(item) for item in self._items] if is_ended else [],
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": body.reasoning or {"effort": None, "summary": None},
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": body.text or {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "usage": self._usage() if is_ended else None,
            "user": body.user,
            "metadata": {name: _as_text(value) for name, value in (body.metadata or {}).items()},
            **self._mark(),
            **(self._signed() if is_ended else {}),
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._generation.usage
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }


def _part_name(kind: str) -> str:
    return "output_text" if kind == "message" else "reasoning_text"


def _copied(item: dict[str, Any]) -> dict[str, Any]:
    """Return an item as it is now; its parts go on growing."""
    content = {"content": [dict(part) for part in item["content"]]} if "content" in item else {}
    return {**item, **content}


def _as_text(value: object) -> str:
    """Return a value of `metadata` as OpenAI's type has it."""
    return value if isinstance(value, str) else json.dumps(value)
