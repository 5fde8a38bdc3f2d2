"""The stream of one request's chunks out of the shell: they queue up, and leave together."""

from __future__ import annotations

import asyncio
import contextlib

from protos.errors import ServingError
from protos.messages import TokenChunk


class TokenStream:
    """Filled by the socket's reader, drained by the request's generator, both on one event loop."""

    def __init__(self) -> None:
        self._chunks: list[TokenChunk] = []
        self._failure: ServingError | None = None
        self._has_news = asyncio.Event()

    def push(self, chunk: TokenChunk) -> None:
        self._chunks.append(chunk)
        self._has_news.set()

    def fail(self, error: ServingError) -> None:
        """End the stream with an error; chunks that have queued up are still delivered."""
        self._failure = error
        self._has_news.set()

    async def next(self, timeout_s: float | None = None) -> list[TokenChunk]:
        """Wait for a chunk, and return all that have queued up; none after `timeout_s`.

        Raises:
            ServingError: the stream has failed, and its last chunk was taken.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_news.wait()
        if not self._has_news.is_set():
            return []
        if not self._chunks:
            assert self._failure is not None, "woken for nothing"
            raise self._failure
        chunks, self._chunks = self._chunks, []
        if self._failure is None:
            self._has_news.clear()
        return chunks
