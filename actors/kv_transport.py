"""KV blocks from a prefill replica: through Ray's object store, or by NIXL from the replica's memory.

    engine thread                       transport thread (asyncio)                       prefill replica
    start(order)  ------------------->  Prefill.prefill(order) ------------------------> computes chunk 1
                                        ChunkHeader            <------------------------
                                        blocks of chunk 1      <------------------------ computes chunk 2 ...
    poll() <- KVChunk <- deque <------  a tensor
                                        FetchEnd               <------------------------
                                        end of the stream      ------------------------> forgets the blocks

In the object store the blocks are a read-only view of shared memory, without a copy. On another node the store first
copies them there.

A prefill replica copies the first blocks of a prompt from another one that holds them, and computes the rest:

                     order, and the replica A that holds its first blocks
pair  ------------------------------------------------------------------>  replica B  ---- copy ---->  replica A
pair  <------------------------------------------------------------------  replica B  <-- blocks ----  replica A
                     A's blocks and the following blocks, which B computes

By NIXL (Ray Direct Transport) blocks stay where they were computed until the pair reads them, GPU to GPU where both
sides have one; the sender does no work, and main memory is not used. Ray's transport manager is used without its object
references: a read of freed memory does not fail, it returns garbage. The sender therefore frees on `release`, not by a
reference count in a third process.
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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from actors.settings import KVTransportKind
from engine.accounting.engine_stats import FetchFailure
from engine.batch.side_stream import pinned, side_stream
from engine.remote_prefill.kv_transfer import (
    ChunkHeader,
    FetchAccepted,
    FetchEnd,
    FetchNews,
    FetchOrder,
    KVChunk,
    KVLayout,
)
from protos.block_keys import PrefixHolder
from protos.errors import ConfigError

if TYPE_CHECKING:  # takes a second to import, and not every process calls a deployment
    from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

_NIXL = "NIXL"
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DirectBlocks:
    """A reference to blocks. `metadata` is Ray's, and is valid until the sender releases the blocks."""

    key: str
    metadata: Any


class NixlCarrier:
    """Sends and releases blocks in a prefill replica, and receives them in a pair.

    All methods block, and may be called from any thread.
    """

    def __init__(self) -> None:
        self._numbers = count()
        self._kept: dict[str, Tensor] = {}
        self._num_sent = 0
        self._lock = threading.Lock()  # for the manager's table of remote agents, which has no lock

    @property
    def stats(self) -> tuple[int, int]:
        """The number of chunks sent and the bytes not released yet. May be read from any thread."""
        return self._num_sent, sum(blocks.nbytes for blocks in list(self._kept.values()))

    @staticmethod
    def problem() -> str | None:
        """Return the reason why this process cannot use NIXL, or None if it can."""
        try:
            NixlCarrier()._manager.get_nixl_agent()
        except Exception as error:  # an import, a plug-in or a device fails; the caller logs the reason
            return f"{type(error).__name__}: {error}".splitlines()[0]
        return None

    def send(self, blocks: Tensor) -> DirectBlocks:
        """Make `blocks`, which are computed, readable for receivers. They must not change until `release`."""
        key = f"kv-{next(self._numbers)}"
        if blocks.is_cuda:  # else Ray waits for all passes that the engine has issued
            self._manager.set_cuda_stream(side_stream(blocks.device))
        metadata = self._manager.extract_tensor_transport_metadata(key, [blocks])
        self._kept[key] = blocks
        self._num_sent += 1
        return DirectBlocks(key, metadata)

    def release(self, sent: DirectBlocks) -> None:
        """Free blocks that have been read, or will never be."""
        self._manager.garbage_collect(sent.key, sent.metadata, [self._kept.pop(sent.key)])

    def receive(self, sent: DirectBlocks, timeout_s: float) -> Tensor:
        """Return a copy of the blocks, on the same kind of device as the sender's.

        Raises:
            RayDirectTransportError: the sender is gone.
            TimeoutError: the read took longer than `timeout_s`.
        """
        manager = self._manager
        way = manager.get_communicator_metadata(None, None, _NIXL)
        with self._lock, _memory_of(sent.metadata.tensor_device):
            request = manager.fetch_multiple_tensors(sent.key, sent.metadata, way)
            blocks: Tensor = manager.wait_fetch_complete(request, timeout_s)[0]
        return blocks

    @cached_property
    def _manager(self) -> Any:
        from ray.experimental.rdt.util import get_tensor_transport_manager  # of Ray's alpha: loaded where it is used

        return get_tensor_transport_manager(_NIXL)


def _memory_of(device_type: str) -> AbstractContextManager[object]:
    """Have tensors on a GPU made in the side stream's memory.

    NIXL writes outside all streams. What is free in the engine's memory may still be read by a pass that was issued.
    """
    return torch.cuda.stream(side_stream(torch.device("cuda"))) if device_type == "cuda" else nullcontext()


def choose_carrier(kind: KVTransportKind) -> NixlCarrier | None:
    """Return the carrier for `prefill.kv_transport`, or None for Ray's object store. Logs the reason.

    Raises:
        ConfigError: NIXL is configured, and this process cannot use it.
    """
    has_gpu = torch.cuda.is_available()
    is_configured = kind is KVTransportKind.OBJECT_STORE
    if is_configured or (kind is KVTransportKind.AUTO and not has_gpu):
        why = "as configured" if is_configured else "without a GPU, shared memory is fastest"
        logger.info("KV blocks go through Ray's object store: %s", why)
        return None
    problem = NixlCarrier.problem()
    if problem is None:
        logger.info("KV blocks go through NIXL (%s)", "GPU to GPU" if has_gpu else "main memory")
        return NixlCarrier()
    if kind is KVTransportKind.NIXL:
        raise ConfigError(
            f"prefill.kv_transport is 'nixl', which this process cannot use ({problem}); "
            "pip install 'outrider[direct]' on every node, or set it to 'object_store'"
        )
    logger.info("KV blocks go through Ray's object store, because NIXL cannot be used: %s", problem)
    return None


# A prefill replica's stream of replies to a `FetchOrder`:
#     FetchAccepted, then any number of (ChunkHeader, its blocks, its state if it has one), then FetchEnd
#     or one FetchEnd alone
# Blocks that the replica has sent stay valid until the reader ends the stream. They are separate replies, not
# references inside one: Ray may free an object that a streamed reply refers to before the reader has it
# (ray-project/ray pull request 58082), but never the reply itself.
BlocksReply = np.ndarray | DirectBlocks  # [n, bytes per block] or [bytes per state] uint8, or a reference to them
PrefillReply = FetchAccepted | ChunkHeader | BlocksReply | FetchEnd


class PrefillTransport:
    """Implements `engine.remote_prefill.kv_transfer.KVTransport` over the handle of the `Prefill` deployment.

    `router.routing.serve_router.PrefillRouter` chooses the replica by cache and queue. Blocks go through Ray's object
    store or, if both sides have a `carrier`, through that. Call `open` before the first fetch.
    """

    _method = "prefill"

    def __init__(self, prefill: DeploymentHandle[Any], carrier: NixlCarrier | None = None) -> None:
        self._prefill = prefill
        self._carrier = carrier
        self._loop = asyncio.new_event_loop()
        self._news: deque[FetchNews] = deque()
        self._fetches: dict[int, Future[None]] = {}

    def open(self, layout: KVLayout, device: torch.device, on_news: Callable[[], None]) -> None:
        """Start the transport's thread, which calls `on_news` whenever `poll` has something to return.

        `device` has the engine's pool.
        """
        self._layout = layout
        self._device = device
        self._on_news = on_news
        threading.Thread(target=self._loop.run_forever, name="kv-transport", daemon=True).start()
        logger.info("remote prefill of %s", layout)

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

    def num_available_blocks(self, request_id: str) -> int | None:
        return None

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
            if _was_cancelled():
                raise
            end = FetchEnd(order.fetch_id, FetchFailure.LOST, f"{type(error).__name__}: {error}".splitlines()[0])
        self._push(end)

    async def _receive(self, order: FetchOrder) -> FetchEnd:
        call = self._call.remote(order, self._layout, use_direct=self._carrier is not None, **self._extra(order))
        stream = cast("DeploymentResponseGenerator[PrefillReply]", call)
        try:
            async for reply in stream:
                match reply:
                    case FetchAccepted():
                        self._push(reply)
                    case ChunkHeader():
                        self._push(await self._chunk(reply, stream, order.timeout_s))
                    case FetchEnd():
                        return reply
        finally:
            stream.cancel()
        return FetchEnd(order.fetch_id)

    @cached_property
    def _call(self) -> DeploymentHandle[Any]:
        """The streaming method, made in the event loop that a handle belongs to.

        By reference: replies pass through the object store, and a large reply is never copied on the way.
        """
        return self._prefill.options(method_name=self._method, stream=True, _by_reference=True)

    def _extra(self, order: FetchOrder) -> dict[str, Any]:
        """Return the arguments that the method has in addition to `Prefill.prefill`'s."""
        return {}

    async def _chunk(self, header: ChunkHeader, replies: AsyncIterator[PrefillReply], timeout_s: float) -> KVChunk:
        began_s = time.perf_counter()
        blocks = await self._tensor(cast(BlocksReply, await anext(replies)), timeout_s)
        state = await self._tensor(cast(BlocksReply, await anext(replies)), timeout_s) if header.has_state else None
        return KVChunk(header, blocks, time.perf_counter() - began_s, state)

    async def _tensor(self, blocks: BlocksReply, timeout_s: float) -> Tensor:
        if not isinstance(blocks, DirectBlocks):
            return await asyncio.to_thread(pinned, _view(blocks), self._device)
        assert self._carrier is not None, "direct blocks come only if requested"
        reading = asyncio.create_task(asyncio.to_thread(self._carrier.receive, blocks, timeout_s))
        try:
            return await asyncio.shield(reading)
        except asyncio.CancelledError:
            await asyncio.wait([reading])  # their memory may be freed only after the read
            raise

    def _push(self, news: FetchNews) -> None:
        self._news.append(news)
        self._on_news()


def _view(blocks: np.ndarray) -> Tensor:
    """Return a view. Never write to it: the object store's memory is read-only."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.from_numpy(blocks)


def _was_cancelled() -> bool:
    """True if `cancel` was called. Serve reports some losses as a cancellation too."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class PeerTransport(PrefillTransport):
    """Fetches a prompt's cached blocks from another replica by its method `copy`, which computes nothing.

    `expect` and `forget` may be called from any thread.
    """

    _method = "copy"

    def __init__(self, peers: DeploymentHandle[Any], carrier: NixlCarrier | None = None) -> None:
        super().__init__(peers, carrier)
        self._holders: dict[str, PrefixHolder] = {}

    def expect(self, request_id: str, holder: PrefixHolder) -> None:
        """Fetch a request's first blocks from `holder`. Call it before the engine gets the request."""
        self._holders[request_id] = holder

    def forget(self, request_id: str) -> None:
        """Fetch no more blocks of this request."""
        self._holders.pop(request_id, None)

    def num_available_blocks(self, request_id: str) -> int:
        holder = self._holders.get(request_id)
        return holder.num_blocks if holder else 0

    def _extra(self, order: FetchOrder) -> dict[str, Any]:
        return {"holder_id": self._holders[order.request_id].worker_id}
