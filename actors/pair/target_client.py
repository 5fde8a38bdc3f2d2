"""The shell's connection to its target: requests, streams of each step's output, and orders about the head."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.pair.token_feed import TokenFeed, TokenFeeds, TokenStream
from actors.process.frames import RECEIVE_BYTES
from actors.shell_messages import (
    Abort,
    Add,
    AskSnapshot,
    HeadAnswer,
    OrderHead,
    Ping,
    Pong,
    Refused,
    RunningHead,
    ShellToTarget,
    Snapshot,
    Status,
    StepOutput,
    TargetReady,
    TargetToShell,
)
from actors.target.index_reporter import TargetEvent
from engine.accounting.goodput import GoodputStats
from protos.errors import DeadlineExceededError, EngineLostError, ModelChangedError, RequestError, UnavailableError
from protos.frames import ConnectionLostError, FrameCodec
from protos.messages import GenerateRequest
from protos.served_model import CHECK_TIMEOUT_S, ModelCard

logger = logging.getLogger(__name__)

PONG_TIMEOUT_S = 10.0  # for a target's answer to a ping, and its greeting; a target without one is restarted


class TargetClient:
    """Connects whenever a target listens at `path`. Without a target every request fails at once.

    `on_event` is called with each greeting, report and loss of a target. `card` describes the last target that greeted.
    `feeds` are the connections to ingresses. `task` runs until `close`.
    """

    def __init__(self, path: Path, on_event: Callable[[TargetEvent], None] = lambda _: None) -> None:
        self.card: ModelCard | None = None
        self.feeds = TokenFeeds()
        self._path = path
        self._on_event = on_event
        self._writer: asyncio.StreamWriter | None = None
        self._is_ready = asyncio.Event()
        self._streams: dict[str, TokenStream] = {}
        self._pongs: deque[asyncio.Future[Pong]] = deque()
        self._orders: dict[int, asyncio.Future[str]] = {}
        self._codec: FrameCodec[TargetToShell] = FrameCodec(TargetToShell)
        self.task = asyncio.create_task(self._stay_connected(), name="target-client")

    @property
    def is_connected(self) -> bool:
        return self._is_ready.is_set()

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    @property
    def request_ids(self) -> frozenset[str]:
        """Ids of the requests that have not ended."""
        return frozenset(self._streams)

    async def wait_connected(self, timeout_s: float = PONG_TIMEOUT_S) -> ModelCard:
        """Wait for a target's greeting, and return its card. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await self._is_ready.wait()
        return self.require_card()

    def require_card(self) -> ModelCard:
        """Return the card of the connected target. Raises UnavailableError without one."""
        if self.card is None or not self.is_connected:
            raise UnavailableError("the target of this pair is restarting; send the request again", retry_after_s=1.0)
        return self.card

    def add(self, request: GenerateRequest, feed: TokenFeed | None = None) -> TokenStream:
        """Send a request, and return the stream of its chunks. A `feed` carries the chunks if given.

        Raises:
            UnavailableError: no target is connected.
            ModelChangedError: the request was made for another model than the target's.
            RequestError: the request's id is in use.
        """
        if request.request_id in self._streams:
            raise RequestError(f"request_id {request.request_id!r} is in use; choose another", param="request_id")
        _check_version(request, self.require_card())
        stream = self._streams[request.request_id] = TokenStream()
        if feed is not None:
            feed.attach(stream)
        self._send(Add(request))
        return stream

    def drop(self, request_id: str) -> None:
        """Drop the stream of a request, and abort the request unless it has ended. Ignore unknown ids."""
        if self._streams.pop(request_id, None) is not None and self.is_connected:
            self._send(Abort(request_id))

    def ask_snapshot(self) -> None:
        """Request the whole prefix cache, which comes as an event. Does nothing without a target."""
        if self.is_connected:
            self._send(AskSnapshot())

    async def ping(self) -> Pong:
        """Return the target's present numbers. Raises TimeoutError or UnavailableError."""
        self.require_card()
        pong: asyncio.Future[Pong] = asyncio.get_running_loop().create_future()
        self._pongs.append(pong)
        self._send(Ping())
        async with asyncio.timeout(PONG_TIMEOUT_S):
            return await pong

    async def order_head(self, order: OrderHead, timeout_s: float) -> str:
        """Return the digest of the head that is loaded or exchanged. Raises TimeoutError, or the target's error."""
        self.require_card()
        loaded: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._orders[order.order_id] = loaded
        self._send(order)
        try:
            async with asyncio.timeout(timeout_s):
                return await loaded
        finally:
            del self._orders[order.order_id]

    def fence(self) -> None:
        """Drop the present target: every stream fails now, and the client waits for the next target."""
        if self._writer is not None:
            self._writer.close()

    async def close(self) -> None:
        """Disconnect for good; streams that are still open fail."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task

    def _send(self, message: ShellToTarget) -> None:
        assert self._writer is not None, "connected"
        self._writer.write(self._codec.encode(message))

    async def _stay_connected(self) -> None:
        while True:
            try:
                reader, self._writer = await asyncio.open_unix_connection(os.fspath(self._path))
                await self._read(reader)
            except (OSError, ConnectionLostError) as error:
                if self.is_connected:
                    logger.warning("target lost with %d requests: %s", len(self._streams), error)
            finally:
                self._disconnect()
            await asyncio.sleep(0.05)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        self._codec = FrameCodec(TargetToShell)
        while data := await reader.read(RECEIVE_BYTES):
            for message in self._codec.feed(data):
                self._handle(message)
        raise ConnectionLostError("the target closed the connection")

    def _handle(self, message: TargetToShell) -> None:
        match message:
            case StepOutput():
                self._deliver(message)
            case Refused(request_id):
                if stream := self._streams.pop(request_id, None):
                    stream.fail(message.error())
            case HeadAnswer():
                self._answer(message)
            case Pong():
                pong = self._pongs.popleft()
                if not pong.done():
                    pong.set_result(message)
            case TargetReady(card):
                self.card = card
                self._is_ready.set()
                self._on_event(message)
            case Status() | Snapshot():
                self._on_event(message)

    def _answer(self, answer: HeadAnswer) -> None:
        order = self._orders.get(answer.order_id)
        if order is None or order.done():
            return  # nobody waits any more
        if answer.refusal is None:
            order.set_result(answer.digest)
        else:
            order.set_exception(answer.refusal.error())

    def _deliver(self, output: StepOutput) -> None:
        for chunk in output.chunks:
            stream = self._streams.get(chunk.request_id)
            if stream is None:
                continue  # dropped while the step was running
            stream.push(chunk)
            if chunk.finish_reason is not None:
                del self._streams[chunk.request_id]
        self.feeds.flush()

    def _disconnect(self) -> None:
        if self.is_connected:
            self._on_event(None)
        self._is_ready.clear()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        lost = EngineLostError("this pair's target was lost; the request can continue elsewhere", retry_after_s=1.0)
        for stream in self._streams.values():
            stream.fail(lost)
        self._streams.clear()
        answers: list[asyncio.Future[Any]] = [*self._pongs, *self._orders.values()]
        for answer in answers:
            if not answer.done():
                answer.set_exception(lost)
        self._pongs.clear()


class TargetHead:
    """The head in a target's process."""

    # A text that began with one head gets no drafts of the next. A trial counts steps without such texts: it waits for
    # their end, but not longer than this.
    _SETTLE_S = 60.0

    def __init__(self, client: TargetClient) -> None:
        self._client = client
        self._num_orders = 0
        self._old_requests: frozenset[str] = frozenset()
        self._settled_s = 0.0

    async def running(self) -> RunningHead:
        """Return the head that drafts. Raises UnavailableError or TimeoutError if the target is away."""
        head = (await self._client.ping()).head
        assert head is not None, "it can be exchanged"
        return head

    async def check_draft(self, path: str) -> None:
        await self._order(path, CHECK_TIMEOUT_S, is_check=True)

    async def replace_draft(self, path: str, wait_s: float) -> str:
        digest = await self._order(path, wait_s)
        self._old_requests, self._settled_s = self._client.request_ids, time.monotonic() + self._SETTLE_S
        return digest

    async def goodput(self) -> tuple[GoodputStats, ...]:
        """Return the target's sums.

        Raises:
            UnavailableError: texts are running that began with the head before, or the target is away.
        """
        pong = await self._client.ping()
        if self._client.request_ids & self._old_requests and time.monotonic() < self._settled_s:
            raise UnavailableError("texts of the head before are still running")
        return pong.engine.goodput

    async def _order(self, path: str, timeout_s: float, *, is_check: bool = False) -> str:
        self._num_orders += 1
        try:
            await self._client.wait_connected(timeout_s)  # a target that restarts takes the order afterwards
            return await self._client.order_head(OrderHead(self._num_orders, path, is_check), timeout_s)
        except TimeoutError:
            raise DeadlineExceededError(
                f"The draft {path!r} was not loaded within {timeout_s:g} s; raise wait_s, or search the target's log."
            ) from None


def _check_version(request: GenerateRequest, card: ModelCard) -> None:
    """Raise ModelChangedError if the request was validated, and perhaps begun, for other weights."""
    if request.model_version not in ("", card.model_version):
        raise ModelChangedError(
            f"The request began with model version {request.model_version}, but this pair serves {card.model_version} "
            "since a redeployment; send the request again."
        )
