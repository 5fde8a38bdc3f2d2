"""The arrival of tokens from pairs on this node, past Serve: one connection for each pair, a frame for all its streams.

The pairs connect (`actors.pair.token_feed`); what they cannot say here, and all that pairs of other nodes say, comes by
Serve's streams. An inbox holds both of one attempt.
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

_READ_BYTES = 1 << 18
_LATE_TOKENS_TIMEOUT_S = 1.0  # for those on their way when Serve's stream has ended


class Inbox:
    """All that comes of one attempt of a request; read by one task."""

    def __init__(self) -> None:
        self._batches: list[list[TokenChunk]] = []
        self._failure: BaseException | None = None
        self._is_ended = False
        self._has_news = asyncio.Event()

    def put(self, batch: list[TokenChunk]) -> None:
        """Take chunks, or a sign of life without any."""
        self._batches.append(batch)
        self._has_news.set()

    def fail(self, error: BaseException) -> None:
        """Take the error that ends the attempt; batches that are there are still read."""
        self._failure = error
        self._has_news.set()

    def end(self) -> None:
        """Take the end of Serve's stream, behind which there may be late tokens."""
        self._is_ended = True
        self._has_news.set()

    async def next(self) -> list[TokenChunk]:
        """Wait for a batch, and return all chunks that are there.

        Raises:
            StopAsyncIteration: Serve's stream has ended, and no more tokens came.
            BaseException: of `fail`.
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


class TokenFeed:
    """Listens at an abstract Unix socket, which only processes of our user are heard at."""

    def __init__(self) -> None:
        self._inboxes: dict[str, Inbox] = {}
        self._address = ""
        self._listening: asyncio.Task[None] | None = None
        self._server: asyncio.Server | None = None  # uvloop closes one that is forgotten

    async def address(self) -> str:
        """Return the address, once it is listened at; empty where it cannot be."""
        if self._listening is None:
            self._listening = asyncio.create_task(self._listen(), name="token-feed")
        if not self._address:
            await asyncio.shield(self._listening)
        return self._address

    def open(self, request_id: str) -> Inbox:
        """Return the inbox of an attempt, by the id that it has at the pair."""
        inbox = self._inboxes[request_id] = Inbox()
        return inbox

    def close(self, request_id: str) -> None:
        """Forget an attempt; what still comes of it is dropped."""
        self._inboxes.pop(request_id, None)

    async def _listen(self) -> None:
        address = f"outrider-{secrets.token_hex(16)}"  # of this ingress alone, on whichever node it is looked for
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(f"\0{address}")  # here, for uvloop knows no abstract addresses
            self._server = await asyncio.start_unix_server(self._read, sock=listener)
        except OSError as error:
            listener.close()
            logger.warning("tokens of pairs on this node come by Serve's streams alone: %s", error)
        else:
            self._address = address

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Sort what one pair sends into the inboxes, until it leaves."""
        peer: socket.socket = writer.get_extra_info("socket")
        codec: FrameCodec[list[TokenChunk]] = FrameCodec(list[TokenChunk])
        try:
            while is_own(peer) and (data := await reader.read(_READ_BYTES)):
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
