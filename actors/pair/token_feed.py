"""Streams of tokens out of the shell; to an ingress on this node one connection for all, one frame per step.

A chunk in a stream of Serve's is a gRPC message in Python. Without these, pair and ingress take less than half the
processor time per chunk. Serve's streams remain for refusals, errors and signs of life.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable

from protos.errors import ServingError, UnavailableError
from protos.frames import FrameCodec
from protos.linux import is_own
from protos.messages import TokenChunk

logger = logging.getLogger(__name__)

_MAX_BACKLOG_BYTES = 32 << 20  # that an ingress may leave unread


class TokenStream:
    """One request's chunks, filled by the socket's reader and drained by the request's generator, on one event loop."""

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


class TokenFeed:
    """The connection to one ingress. When it is lost, its streams fail; their requests can continue elsewhere."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._codec: FrameCodec[None] = FrameCodec(None)
        self._chunks: list[TokenChunk] = []
        self._streams: set[TokenStream] = set()
        self._watching = asyncio.create_task(self._watch(reader), name="token-feed")

    @property
    def is_open(self) -> bool:
        return not self._writer.is_closing()

    def attach(self, stream: TokenStream) -> None:
        """Send a stream's chunks through the feed from now on. Does nothing if the feed is lost."""
        if self.is_open:
            stream.divert(self._chunks.append)
            self._streams.add(stream)

    def detach(self, stream: TokenStream) -> None:
        self._streams.discard(stream)

    def flush(self) -> None:
        """Send the chunks queued since the last call."""
        if not self._chunks or not self.is_open:
            return
        self._writer.write(self._codec.encode(self._chunks))
        self._chunks.clear()
        if self._writer.transport.get_write_buffer_size() > _MAX_BACKLOG_BYTES:
            logger.warning("an ingress left %d MiB of tokens unread; closing its feed", _MAX_BACKLOG_BYTES >> 20)
            self._writer.transport.abort()

    async def _watch(self, reader: asyncio.StreamReader) -> None:
        """Wait until the connection ends; the ingress never sends on it."""
        try:
            await reader.read(1)
        except OSError:
            pass
        finally:
            self._writer.close()
            lost = UnavailableError("the feed to the ingress was lost; the request can continue", retry_after_s=1.0)
            for stream in self._streams:
                stream.fail(lost)


class TokenFeeds:
    """The feeds of a pair, by the address of the ingress."""

    def __init__(self) -> None:
        self._feeds: dict[str, TokenFeed] = {}

    async def open(self, address: str) -> TokenFeed | None:
        """Return the feed to an ingress, or None if it has no address or listens on another node."""
        if not address:
            return None
        feed = self._feeds.get(address)
        if feed is not None and feed.is_open:
            return feed
        self._feeds = {known: feed for known, feed in self._feeds.items() if feed.is_open}
        connection = await _connect(address)
        if connection is not None and address not in self._feeds:  # another request may have been faster
            self._feeds[address] = TokenFeed(*connection)
        return self._feeds.get(address)

    def flush(self) -> None:
        """Send the chunks queued on all feeds since the last call."""
        for feed in self._feeds.values():
            feed.flush()


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    """Return a connection to an abstract Unix socket of our own user; None if no process of this node listens there."""
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.setblocking(False)
    try:
        peer.connect(f"\0{address}")  # not by uvloop, which supports no abstract addresses
        if is_own(peer):
            return await asyncio.open_unix_connection(sock=peer)
    except OSError:
        pass  # no such address here, or its backlog is full
    peer.close()
    return None
