"""Server-sent events, as OpenAI streams them: from the deltas of a generation to bytes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterable
from itertools import chain

from pydantic import BaseModel
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from protos.errors import EngineError, ServingError
from router.generation.delta import Delta
from router.generation.generation import ClosableStream, Generation
from router.metrics.ingress_metrics import BROKEN_STATUS
from router.openai.response_writer import ResponseWriter

logger = logging.getLogger(__name__)

KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which every reader of events leaves out
KEEP_ALIVE_S = 15.0
_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class EventStream(StreamingResponse):
    """A response that sends events; `first` and `deltas`, which they are made of, are ended however it ends."""

    media_type = "text/event-stream"

    def __init__(
        self,
        first: asyncio.Task[Iterable[BaseModel]],
        deltas: ClosableStream[Delta],
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
    """Return a response whose first event is there already: an error before it is answered with its own status.

    One that takes longer than `KEEP_ALIVE_S` is begun without, and sends comments meanwhile: who waits for bytes, a
    client or a balancer, would give a silent connection up long before `router.backend.migration.FIRST_TOKEN_S`.
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


async def _end(first: asyncio.Task[Iterable[BaseModel]], deltas: ClosableStream[Delta]) -> None:
    """Close `deltas`, after the task that may be waiting for the first of them."""
    if not first.done():
        first.cancel()
        await asyncio.wait([first])
    await deltas.aclose()


async def _first_chunks(deltas: ClosableStream[Delta], writer: ResponseWriter) -> Iterable[BaseModel]:
    """Return the chunks of the first delta that has any; later chunks of it are made when they are sent."""
    async for delta in deltas:
        chunks = iter(writer.chunks(delta))
        if (first := next(chunks, None)) is not None:
            return chain([first], chunks)
    return ()
