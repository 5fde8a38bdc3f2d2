"""A generation written for a client of an OpenAI endpoint: in full, or chunk by chunk as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Sequence
from itertools import chain
from typing import Any, Literal, cast

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from protos.errors import EngineError, ServingError
from protos.messages import FinishReason
from router.generation.delta import Delta, pieces
from router.generation.generation import Generation
from router.metrics.ingress_metrics import BROKEN_STATUS
from router.openai.errors import error_object
from router.openai.usage import (
    ApproximateSpeculation,
    DraftEvent,
    ResponseMetrics,
    SpeculativeDecoding,
    explanation_object,
    usage_object,
)
from router.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Body = BaseModel | dict[str, Any]  # an answer or an event; a dictionary where no required package has its type
OpenAIFinishReason = Literal["stop", "length", "tool_calls"]
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which readers of events skip
KEEP_ALIVE_S = 15.0
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class ResponseWriter(ABC):
    """Writes the answers of one endpoint; this base writes the envelope of every body and its optional fields."""

    end = b"data: [DONE]\n\n"  # of a stream without an error

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._fields = generation.fields
        self._num_open = generation.num_choices

    @abstractmethod
    def full(self, gained: Sequence[Sequence[Delta]]) -> Body:
        """Return the answer in one body, from all deltas of each choice."""

    def chunks(self, delta: Delta) -> Iterable[Body]:
        """Yield a chunk for each part of a delta: text, thought, call; none if the client sees nothing of it."""
        yield from self._begin(delta)
        for piece in pieces(delta):
            yield from self._chunks(piece)

    def _begin(self, delta: Delta) -> Iterable[Body]:
        """Yield what precedes the first chunk of a choice."""
        return ()

    @abstractmethod
    def _chunks(self, piece: Delta) -> Iterable[Body]:
        """Yield the chunks for a delta with one part."""

    @abstractmethod
    def last_chunks(self) -> Iterable[Body]:
        """Yield the chunks after the last delta: one with the usage, for a client that asked for it."""

    def event(self, chunk: Body) -> bytes:
        """Return a chunk as a server-sent event."""
        return b"data: " + _event_json(chunk) + b"\n\n"

    def error_event(self, error: ServingError) -> bytes:
        """Return the last event of a stream that failed."""
        return b"data: " + json.dumps(error_object(error)).encode() + b"\n\n"

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self._generation.id,
            "created": self._generation.created_s,
            "model": self._generation.model_id,
            "system_fingerprint": self._generation.system_fingerprint,
            **self._mark(),
        }

    def _mark(self) -> dict[str, Any]:
        """Return the mark of an output that is not exact, for every body and every chunk."""
        steps = self._generation.steps
        return {} if steps is None else {"x_speculation": ApproximateSpeculation(**steps.figures())}

    def _accounts(self) -> dict[str, Any]:
        """Return usage and metrics; complete once every choice has ended."""
        usage = self._generation.usage
        return {"usage": usage_object(usage), **self._metrics()}

    def _signed(self) -> dict[str, Any]:
        """Return the receipt, if the client wants one; read at the end."""
        receipt = self._generation.receipt
        return {} if receipt is None else {"receipt": receipt}

    def _metrics(self) -> dict[str, Any]:
        """Return the metrics, and a receipt if the client wants one; complete once every choice has ended."""
        usage = self._generation.usage
        if usage.speculation is None:
            return self._signed()
        metrics = ResponseMetrics(speculative_decoding=SpeculativeDecoding(**usage.speculation.figures()))
        if usage.explanation is not None:
            metrics.speculation_explanation = explanation_object(usage.explanation)
        return {"metrics": metrics, **self._signed()}

    def _chunk_accounts(self, delta: Delta) -> dict[str, Any]:
        """Return the accounts of one chunk: the last holds the metrics, unless one with the usage follows it."""
        if delta.finish_reason is not None:
            self._num_open -= 1
        if self._fields.has_usage_chunk:
            return self._usage_so_far()
        return self._metrics() if self._num_open == 0 else {}

    def _usage_so_far(self) -> dict[str, Any]:
        """Return `usage` of a chunk before the last: null for a client that wants it once, else absent."""
        if not self._fields.has_usage_chunk:
            return {}
        is_wanted = self._fields.has_running_usage
        return {"usage": usage_object(self._generation.usage) if is_wanted else None}

    def _token_ids(self, delta: Delta) -> dict[str, Any]:
        fields: dict[str, Any] = {"token_ids": list(delta.token_ids)} if self._fields.return_token_ids else {}
        return {**fields, "token_sources": list(delta.sources)} if self._fields.return_token_sources else fields

    def _prompt_token_ids(self, index: int) -> dict[str, Any]:
        """Return the prompt's token ids if the client wants them, as vLLM does."""
        return {"prompt_token_ids": self._generation.prompt_token_ids(index)} if self._fields.return_token_ids else {}

    def _drafts(self, delta: Delta) -> dict[str, Any]:
        """Return the body of an event with drafts that are not verified yet; no choice, so no reader takes them."""
        draft = DraftEvent(index=delta.index, token_ids=list(delta.draft_ids), text=delta.draft_text)
        return {"choices": [], "x_drafts": [draft], **self._envelope(), **self._usage_so_far()}

    def _has_news(self, delta: Delta) -> bool:
        """True if the client sees anything of this delta."""
        is_listed = bool(self._fields.return_token_ids) or bool(self._fields.return_token_sources)
        has_tokens = bool(delta.token_ids) and (bool(delta.logprobs) or is_listed)
        return (
            bool(delta.text)
            or bool(delta.reasoning)
            or bool(delta.tool_calls)
            or has_tokens
            or delta.finish_reason is not None
        )


class NamedEventWriter(ResponseWriter):
    """Writes the one choice of a turn, in events with names."""

    end = b""

    def event(self, chunk: Body) -> bytes:
        assert isinstance(chunk, dict)
        return f"event: {chunk['type']}\ndata: ".encode() + _event_json(chunk) + b"\n\n"


def body_json(body: Body) -> bytes:
    """Return the JSON of an answer or of an event."""
    return to_json(body) if isinstance(body, dict) else body.model_dump_json(exclude_unset=True).encode()


def _event_json(body: Body) -> bytes:
    """Return the JSON of an event, on one line by any reader's rules.

    httpx, and clients that use it, read lines with Python's `splitlines`, which ends one at each of these characters.
    """
    text = body_json(body)
    for raw, escaped in ((b"\xc2\x85", rb"\u0085"), (b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029")):
        text = text.replace(raw, escaped)
    return text


def openai_reason(reason: FinishReason | None) -> OpenAIFinishReason | None:
    """Return the reason as OpenAI has it; None while the choice goes on."""
    assert reason is not FinishReason.ABORT  # a sequence given up by its pair moves on, it does not end
    return None if reason is None else cast(OpenAIFinishReason, reason.value)


class EventStream(StreamingResponse):
    """A response that sends events. However it ends, `first` and `deltas` are closed."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: asyncio.Task[Iterable[Body]],
        deltas: AsyncGenerator[Delta, None],
        writer: ResponseWriter,
    ) -> None:
        self._first = first
        self._deltas = deltas
        self._writer = writer
        self._error: ServingError | None = None
        super().__init__(self._events(), headers=_HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await _end(self._first, self._deltas)
            if self._error is not None:
                scope.setdefault("state", {})[BROKEN_STATUS] = self._error.http_status

    async def _events(self) -> AsyncGenerator[bytes, None]:
        """Yield one event per chunk, then `[DONE]`; an error becomes one last event with OpenAI's error object."""
        writer = self._writer
        try:
            while not self._first.done():
                yield KEEP_ALIVE
                await asyncio.wait([self._first], timeout=KEEP_ALIVE_S)
            for chunk in self._first.result():
                yield writer.event(chunk)
            async for delta in self._deltas:
                for chunk in writer.chunks(delta):
                    yield writer.event(chunk)
            for chunk in writer.last_chunks():
                yield writer.event(chunk)
            if writer.end:
                yield writer.end
        except ServingError as error:
            self._error = error
        except Exception:  # the edge of the process: the client gets a last word, the log the fault
            logger.exception("a stream failed")
            self._error = EngineError("The server failed while streaming this answer; it is a server fault.")
        if self._error is not None:
            yield writer.error_event(self._error)


async def start_stream(generation: Generation, writer: ResponseWriter) -> EventStream:
    """Wait for the first event and return the response, so that an earlier error has its own status.

    After `KEEP_ALIVE_S` without an event the response begins and sends comments: clients and load balancers give up a
    silent connection long before `router.backend.migration.FIRST_TOKEN_S`.
    """
    deltas = generation.deltas()
    first = asyncio.create_task(_first_chunks(deltas, writer), name="first-chunks")
    try:
        await asyncio.wait([first], timeout=KEEP_ALIVE_S)
        if first.done():
            first.result()
    except BaseException:
        await _end(first, deltas)
        raise
    return EventStream(first, deltas, writer)


async def _end(first: asyncio.Task[Iterable[Body]], deltas: AsyncGenerator[Delta, None]) -> None:
    """Close `deltas`, after the task that may be waiting for the first of them."""
    if not first.done():
        first.cancel()
        await asyncio.wait([first])
    await deltas.aclose()


async def _first_chunks(deltas: AsyncGenerator[Delta, None], writer: ResponseWriter) -> Iterable[Body]:
    """Return the chunks of the first delta that has any; later chunks of it are made when they are sent."""
    async for delta in deltas:
        chunks = iter(writer.chunks(delta))
        if (first := next(chunks, None)) is not None:
            return chain([first], chunks)
    return ()
