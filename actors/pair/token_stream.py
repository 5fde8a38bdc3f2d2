"""The stream of one request's chunks out of the shell. Queued chunks leave together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from protos.errors import ServingError
from protos.messages import TokenChunk


class TokenStream:
    """Filled by the socket's reader and drained by the request's generator, both on one event loop."""

    def __init__(self) -> None:
        self._chunks: list[TokenChunk] = []
        self._divert: Callable[[TokenChunk], None] | None = None
        self._is_complete = False
        self._failure: ServingError | None = None
        self._has_news = asyncio.Event()

    @property
    def is_finished(self) -> bool:
        """True once the last chunk was taken, here or by the function that chunks are diverted to."""
        return self._is_complete and not self._chunks

    def divert(self, take: Callable[[TokenChunk], None]) -> None:
        """Pass each chunk to `take` instead. `next` then returns only at the end, and without chunks."""
        self._divert = take

    def push(self, chunk: TokenChunk) -> None:
        self._is_complete = chunk.finish_reason is not None
        if self._divert is None:
            self._chunks.append(chunk)
            self._has_news.set()
            return
        self._divert(chunk)
        if self._is_complete:
            self._has_news.set()

    def fail(self, error: ServingError) -> None:
        """End the stream with an error. Queued chunks are still delivered."""
        self._failure = error
        self._has_news.set()

    async def next(self, timeout_s: float | None = None) -> list[TokenChunk]:
        """Wait for a chunk, and return all queued chunks; an empty list after `timeout_s`.

        Raises:
            ServingError: the stream has failed, and its last chunk was taken.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_news.wait()
        if not self._has_news.is_set():
            return []
        if not self._chunks and not self._is_complete:
            assert self._failure is not None, "woken without a reason"
            raise self._failure
        chunks, self._chunks = self._chunks, []
        if self._failure is None:
            self._has_news.clear()
        return chunks
