"""Server-sent events, as OpenAI streams them."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from protos.errors import EngineError, ServingError
from router.openai.errors import error_object

logger = logging.getLogger(__name__)

_DONE = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """Sends each text of `events` as one event, then `[DONE]`. The generator is closed however the response ends.

    An error inside the stream becomes one last event with OpenAI's error object, without `[DONE]`.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        self._source = events
        super().__init__(_encoded(events), headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._source):
            await super().__call__(scope, receive, send)


async def start_stream(events: AsyncGenerator[str, None]) -> EventStream:
    """A response whose first event is already there, so that an error before it is answered with its own status."""
    try:
        first = await anext(events)
    except BaseException:
        await events.aclose()
        raise
    return EventStream(_resumed(first, events))


async def _resumed(first: str, rest: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    async with aclosing(rest):
        yield first
        async for event in rest:
            yield event


async def _encoded(events: AsyncGenerator[str, None]) -> AsyncGenerator[bytes, None]:
    try:
        async for event in events:
            yield b"data: " + event.encode() + b"\n\n"
        yield _DONE
    except ServingError as error:
        yield _error_event(error)
    except Exception:  # the edge of the process: the client gets a last word, the log the fault
        logger.exception("a stream failed")
        yield _error_event(EngineError("The server failed while it streamed this answer; the fault is ours."))


def _error_event(error: ServingError) -> bytes:
    return b"data: " + json.dumps(error_object(error)).encode() + b"\n\n"
