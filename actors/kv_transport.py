"""KV blocks by way of Ray's object store: from a prefill replica's reply to a view of shared memory here.

    engine thread                       transport thread (asyncio)                       prefill replica
    start(order)  ------------------->  Prefill.prefill(order) ------------------------> computes chunk 1
                                        PrefillComputed        <------------------------
                                        blocks of chunk 1      <-- object store -------- computes chunk 2 ...
    poll() <- KVChunk <- deque <------  a read-only view, no copy

On another node the object store copies the object over first; the code is the same.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import warnings
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import cached_property
from typing import cast

import torch
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from torch import Tensor

from actors.prefill_messages import (
    PrefillAccepted,
    PrefillBlocks,
    PrefillComputed,
    PrefillFailed,
    PrefillOrder,
    PrefillReply,
)
from engine.fetch_failure import FetchFailure
from engine.kv_transfer import FetchAccepted, FetchEnd, FetchNews, FetchOrder, KVChunk, KVLayout

logger = logging.getLogger(__name__)


class ObjectStoreTransport:
    """Implements `engine.kv_transfer.KVTransport` over the handle of the `Prefill` deployment.

    Serve chooses the replica, the less busy of two. `open` before the first fetch.
    """

    def __init__(self, prefill: DeploymentHandle) -> None:
        self._prefill = prefill
        self._loop = asyncio.new_event_loop()
        self._news: deque[FetchNews] = deque()
        self._fetches: dict[int, Future[None]] = {}

    def open(self, layout: KVLayout, on_news: Callable[[], None]) -> None:
        """Start the transport's thread. `on_news` is called there, whenever there is something to poll."""
        self._layout = layout
        self._on_news = on_news
        threading.Thread(target=self._loop.run_forever, name="kv-transport", daemon=True).start()
        logger.info("remote prefill: KV blocks come through Ray's object store, %s", layout)

    def start(self, order: FetchOrder) -> None:
        self._fetches[order.fetch_id] = asyncio.run_coroutine_threadsafe(self._fetch(order), self._loop)

    def poll(self, max_news: int) -> list[FetchNews]:
        polled: list[FetchNews] = []
        while self._news and len(polled) < max_news:
            news = self._news.popleft()
            if news.fetch_id not in self._fetches:
                continue  # cancelled
            if isinstance(news, FetchEnd):
                del self._fetches[news.fetch_id]
            polled.append(news)
        return polled

    def cancel(self, fetch_id: int) -> None:
        fetch = self._fetches.pop(fetch_id, None)
        if fetch is not None:
            fetch.cancel()

    # ---- in the transport's thread

    async def _fetch(self, order: FetchOrder) -> None:
        try:
            async with asyncio.timeout(order.timeout_s):
                end = await self._receive(order)
        except TimeoutError:
            end = FetchEnd(order.fetch_id, FetchFailure.TIMEOUT, f"not complete after {order.timeout_s:.1f} s")
        except (Exception, asyncio.CancelledError) as error:
            if _is_given_up():
                raise
            end = FetchEnd(order.fetch_id, FetchFailure.LOST, f"{type(error).__name__}: {error}".splitlines()[0])
        self._say(end)

    async def _receive(self, order: FetchOrder) -> FetchEnd:
        stream = cast(DeploymentResponseGenerator, self._call.remote(self._remote_order(order)))
        try:
            async for reply in stream:
                match reply:
                    case PrefillAccepted(load):
                        self._say(FetchAccepted(order.fetch_id, load))
                    case PrefillComputed():
                        self._say(await _chunk(order.fetch_id, reply, stream))
                    case PrefillFailed(cause, detail):
                        return FetchEnd(order.fetch_id, cause, detail)
        finally:
            stream.cancel()
        return FetchEnd(order.fetch_id)

    @cached_property
    def _call(self) -> DeploymentHandle:
        """The streaming method; a handle belongs to the event loop in which it is made.

        By reference: replies then pass through the object store, and a large one is never copied on its way.
        """
        return self._prefill.options(method_name="prefill", stream=True, _by_reference=True)

    def _remote_order(self, order: FetchOrder) -> PrefillOrder:
        return PrefillOrder(
            order.request_id, order.token_ids, order.first_block, order.cache_salt, order.timeout_s, self._layout
        )

    def _say(self, news: FetchNews) -> None:
        self._news.append(news)
        self._on_news()


async def _chunk(fetch_id: int, computed: PrefillComputed, replies: AsyncIterator[PrefillReply]) -> KVChunk:
    began_s = time.perf_counter()
    blocks = cast(PrefillBlocks, await anext(replies))
    return KVChunk(fetch_id, computed.first_block, _tensor(blocks), time.perf_counter() - began_s, computed.load)


def _tensor(blocks: PrefillBlocks) -> Tensor:
    """A view; the object store's memory is read-only, and so must the tensor be treated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(blocks)


def _is_given_up() -> bool:
    """Whether `cancel` was called, as opposed to Serve, which reports some losses as a cancellation too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
