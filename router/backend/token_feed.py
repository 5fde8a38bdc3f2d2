"""Receives tokens from pairs on this node without Serve: one connection per pair, one frame for all its streams.

The pairs connect (`actors.pair.token_feed`). What a pair cannot send here, and everything from pairs on other nodes,
arrives through Serve's streams. An inbox merges both for one attempt.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket

from protos.frames import ConnectionLostError, FrameCodec
from protos.linux import is_own
from protos.messages import TokenChunk

logger = logging.getLogger(__name__)

_LATE_TOKENS_TIMEOUT_S = 1.0  # for tokens still on their way when Serve's stream has ended


class Inbox:
    """Everything that arrives for one attempt of a request; consumed by one task."""

    def __init__(self) -> None:
        self._batches: list[list[TokenChunk]] = []
        self._failure: BaseException | None = None
        self._is_ended = False
        self._has_news = asyncio.Event()

    def put(self, batch: list[TokenChunk]) -> None:
        """Add chunks, or an empty batch as a sign of life."""
        self._batches.append(batch)
        self._has_news.set()

    def fail(self, error: BaseException) -> None:
        """End the attempt with an error; batches that arrived before it are still returned."""
        self._failure = error
        self._has_news.set()

    def end(self) -> None:
        """Mark the end of Serve's stream; tokens may still arrive."""
        self._is_ended = True
        self._has_news.set()

    async def next(self) -> list[TokenChunk]:
        """Wait for a batch, and return all chunks that have arrived.

        Raises:
            StopAsyncIteration: Serve's stream has ended, and no tokens are outstanding.
            BaseException: the error passed to `fail`.
        """
        if not self._batches:
            await self._wait()
        chunks = [chunk for batch in self._batches for chunk in batch]
        self._batches.clear()
        return chunks

    async def _wait(self) -> None:
        while not self._batches:
            if self._failure is not None:
                raise self._failure
            self._has_news.clear()
            if not self._is_ended:
                await self._has_news.wait()
                continue
            try:
                async with asyncio.timeout(_LATE_TOKENS_TIMEOUT_S):
                    await self._has_news.wait()
            except TimeoutError:
                raise StopAsyncIteration from None


class TokenListener:
    """Listens at an abstract Unix socket and accepts only processes of our user."""

    def __init__(self) -> None:
        self._inboxes: dict[str, Inbox] = {}
        self._address = ""
        self._listening: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None  # a reference: uvloop closes a server without one

    async def address(self) -> str:
        """Start listening if necessary, and return the address; empty if that failed."""
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen(), name="token-feed")
        if not self._address:
            await asyncio.shield(self._listening)
        return self._address

    def open(self, request_id: str) -> Inbox:
        """Return the inbox of an attempt; the id is the attempt's id at the pair."""
        inbox = self._inboxes[request_id] = Inbox()
        return inbox

    def close(self, request_id: str) -> None:
        """Forget an attempt; later chunks for it are dropped."""
        self._inboxes.pop(request_id, None)

    async def _listen(self) -> None:
        address = f"outrider-{secrets.token_hex(16)}"  # unique to this ingress on any node
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"\0{address}")  # bound here, since uvloop does not support abstract addresses
            self._server = await asyncio.start_unix_server(self._read, sock=listener)
        except OSError as error:
            listener.close()
            logger.warning("no token feed; tokens of pairs on this node arrive through Serve's streams only: %s", error)
        else:
            self._address = address

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Sort one pair's chunks into the inboxes until it disconnects."""
        peer: socket.socket = writer.get_extra_info("socket")
        codec: FrameCodec[list[TokenChunk]] = FrameCodec(list[TokenChunk])
        try:
            while is_own(peer) and (data := await reader.read(1 << 18)):
                for chunks in codec.feed(data):
                    self._sort(chunks)
        except (OSError, ConnectionLostError) as error:
            logger.warning("the feed of a pair broke: %s", error)
        finally:
            writer.close()

    def _sort(self, chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            if (inbox := self._inboxes.get(chunk.request_id)) is not None:
                inbox.put([chunk])
