"""One request's way out of the shell: chunks queue up here, and leave together."""

from __future__ import annotations

import asyncio

from protos.errors import ServingError
from protos.messages import TokenChunk


class TokenStream:
    """Filled by the socket's reader, drained by the request's generator; both live on one event loop."""

    def __init__(self) -> None:
        self._chunks: list[TokenChunk] = []
        self._failure: ServingError | None = None
        self._has_news = asyncio.Event()

    def push(self, chunk: TokenChunk) -> None:
        self._chunks.append(chunk)
        self._has_news.set()

    def fail(self, error: ServingError) -> None:
        """No more chunks will come; those that are here are still delivered."""
        self._failure = error
        self._has_news.set()

    async def next(self) -> list[TokenChunk]:
        """All chunks that have queued up, at least one.

        Raises:
            ServingError: what the stream failed with, after its last chunk was taken.
        """
        await self._has_news.wait()
        if not self._chunks:
            assert self._failure is not None, "woken for nothing"
            raise self._failure
        chunks, self._chunks = self._chunks, []
        if self._failure is None:
            self._has_news.clear()
        return chunks
