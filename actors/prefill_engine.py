"""The engine of a prefill replica, in its own thread, and the orders that asyncio waits for."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any

from actors.kv_transport import BlocksReply, DirectBlocks, PeerTransport, PrefillReply, choose_carrier
from actors.process.actor_thread import ActorThread, without_compiler
from actors.settings import PrefillSettings
from actors.shell_messages import Abort, Add, AskSnapshot, Refused, Snapshot, Status, StepOutput
from actors.target.engine_loop import STEP_TIMEOUT_S, EngineLoop, StatusReporter
from actors.target.index_reporter import IndexReporter, ReportSink
from engine.accounting.engine_stats import EngineStats, FetchFailure
from engine.batch.side_stream import PendingTensor
from engine.engine_core.loading import load_engine
from engine.model.runner.model_runner import ModelRunner
from engine.model.runner.tensor_parallel_runner import TensorParallelRunner
from engine.remote_prefill.kv_transfer import (
    BlockExporter,
    ChunkHeader,
    ExportedBlocks,
    FetchAccepted,
    FetchEnd,
    FetchOrder,
    KVLayout,
    RemoteLoad,
)
from engine.sequence.sequence import TokenBlocks
from protos.block_keys import PrefixHolder
from protos.errors import UnavailableError
from protos.messages import FinishReason, GenerateRequest, SamplingParams, TokenChunk

if TYPE_CHECKING:  # takes a second to import, and not every process calls a deployment
    from ray.serve.handle import DeploymentHandle

logger = logging.getLogger(__name__)

_SAMPLING = SamplingParams(temperature=0.0, max_tokens=1)  # the single token is not used
_GRACE_S = 10.0  # after an order's time-out, for a late reader to end its stream
_Event = ExportedBlocks | TokenChunk | Refused


class PrefillEngine:
    """An `EngineCore` that only prefills. Each chunk's blocks leave while the next chunk is computed.

    Construct it in the event loop that will call `prefill`; the engine's own thread loads the model. Its cache and its
    queue are reported to `index`. `peers` is this replica's own deployment: a prefix that another replica holds is
    copied from there.
    """

    def __init__(
        self, settings: PrefillSettings, replica_id: str, index: ReportSink, peers: DeploymentHandle[Any]
    ) -> None:
        self._settings = settings
        self._replica_id = replica_id
        self._peer_handle = peers
        self._event_loop = asyncio.get_running_loop()
        self._events: dict[str, asyncio.Queue[_Event]] = {}
        self._numbers = count()
        self._reporter = IndexReporter(replica_id, index)
        self._thread = ActorThread("Prefill", self._serve, settings.niceness)

    async def wait_ready(self) -> None:
        """Return when the model is loaded. Raises ConfigError if it cannot be served."""
        await asyncio.to_thread(self._thread.wait_ready)
        self._reporter.on_ready()
        reporting = self._reporter.run(lambda: self._loop.submit(AskSnapshot()), lambda: self.num_requests)
        self._reporting = asyncio.create_task(reporting, name="index-reporter")

    @property
    def num_requests(self) -> int:
        """The number of orders in progress."""
        return len(self._events)

    @property
    def work(self) -> dict[str, float]:
        """The waiting work, as `IndexReporter.work`."""
        return self._reporter.work

    @property
    def stats(self) -> EngineStats:
        """The engine's numbers as of its last report."""
        return self._loop.stats

    @property
    def direct(self) -> tuple[int, int]:
        """Chunks that pairs read from this process's memory, and the bytes that are kept for them."""
        return self._carrier.stats if self._carrier else (0, 0)

    def check(self) -> None:
        """Raise UnavailableError if the engine has work and makes no progress."""
        if self._loop.stalled_s > STEP_TIMEOUT_S:
            raise UnavailableError(
                f"no prompt tokens were computed for {self._loop.stalled_s:.0f} s, and the limit is "
                f"{STEP_TIMEOUT_S:.0f} s; the replica is replaced"
            )

    def prefill(
        self, order: FetchOrder, layout: KVLayout, use_direct: bool, holder: PrefixHolder | None = None
    ) -> AsyncGenerator[PrefillReply, None]:
        """Compute an order's tokens, and send blocks as they are computed. Closing the generator frees everything.

        Leading blocks that `holder` has are copied from there if that is faster.
        """

        def begin(request_id: str) -> None:
            is_copied = not self._layout.states  # a prefix's end has a snapshot of recurrent layers only by chance
            if is_copied and holder is not None and holder.worker_id != self._replica_id:
                self._peers.expect(request_id, holder)
            self._exporter.watch(request_id, order.first_block)
            self._loop.submit(Add(_request(request_id, order)))

        return self._answer(order, layout, use_direct, begin, self._load)

    def copy(self, order: FetchOrder, layout: KVLayout, use_direct: bool) -> AsyncGenerator[PrefillReply, None]:
        """Send an order's cached blocks, as `prefill` does. Nothing is computed, and nothing queues."""

        def begin(request_id: str) -> None:
            self._loop.submit(lambda: self._copy(request_id, order))

        load = RemoteLoad(self._replica_id, 0, 0.0)  # a copy never waits for a prompt
        return self._answer(order, layout, use_direct, begin, lambda: load)

    async def _answer(
        self,
        order: FetchOrder,
        layout: KVLayout,
        use_direct: bool,
        begin: Callable[[str], None],
        load_of: Callable[[], RemoteLoad],
    ) -> AsyncGenerator[PrefillReply, None]:
        """Reply to an order with the events of the request that `begin` starts under the given id."""
        if difference := self._layout.difference(layout):
            yield FetchEnd(order.fetch_id, FetchFailure.MISMATCH, difference)
            return
        # The engine computes the prompt under an id of its own; its events become replies.
        request_id = f"{order.request_id}-{next(self._numbers)}"
        events = self._events[request_id] = asyncio.Queue()
        load = load_of()
        begin(request_id)
        sent: list[DirectBlocks] = []
        try:
            yield FetchAccepted(order.fetch_id, load)
            async for reply in self._replies(order.fetch_id, events, use_direct, load_of):
                if isinstance(reply, DirectBlocks):
                    sent.append(reply)
                yield reply
            if sent:  # kept until the reader has read them and ends the stream
                await asyncio.sleep(order.timeout_s + _GRACE_S)
        finally:
            # However the stream ends, nothing of the request stays.
            self._release(sent)
            del self._events[request_id]
            self._exporter.forget(request_id)
            self._peers.forget(request_id)
            self._loop.submit(Abort(request_id))

    async def _replies(
        self, fetch_id: int, events: asyncio.Queue[_Event], use_direct: bool, load_of: Callable[[], RemoteLoad]
    ) -> AsyncGenerator[PrefillReply, None]:
        while True:
            match await events.get():
                case ExportedBlocks(_, first_block, blocks, state):
                    await asyncio.to_thread(blocks.on_device)  # the reader measures the way from the header on
                    yield ChunkHeader(fetch_id, first_block, load_of(), has_state=state is not None)
                    yield await self._parcel(blocks, use_direct)
                    if state is not None:
                        yield await self._parcel(state, use_direct)
                case Refused() as refused:
                    yield FetchEnd(fetch_id, FetchFailure.REFUSED, refused.message)
                    return
                case TokenChunk(finish_reason=FinishReason.TIMEOUT):
                    detail = "the order's deadline passed in the prefill replica"
                    yield FetchEnd(fetch_id, FetchFailure.TIMEOUT, detail)
                    return
                case TokenChunk(finish_reason=FinishReason.NON_FINITE) as chunk:
                    yield FetchEnd(fetch_id, FetchFailure.REFUSED, chunk.error)
                    return
                case TokenChunk():
                    yield FetchEnd(fetch_id)
                    return

    async def _parcel(self, pending: PendingTensor, use_direct: bool) -> BlocksReply:
        """Copy the blocks, or register them for reading, outside the event loop."""
        if not use_direct or self._carrier is None or not pending.num_bytes:
            return await asyncio.to_thread(lambda: pending.in_main_memory().numpy())
        carrier = self._carrier
        sending = asyncio.create_task(asyncio.to_thread(lambda: carrier.send(pending.on_device())))
        try:
            return await asyncio.shield(sending)
        except asyncio.CancelledError:
            sending.add_done_callback(lambda sent: self._release([sent.result()]))  # the reader has left
            raise

    def _release(self, sent: list[DirectBlocks]) -> None:
        for blocks in sent:
            assert self._carrier is not None, "the carrier sent them"
            self._event_loop.run_in_executor(None, self._carrier.release, blocks)

    def _load(self) -> RemoteLoad:
        stats = self.stats
        return RemoteLoad(self._replica_id, stats.num_queued_prefill_tokens, stats.prefill_tokens_per_s)

    # ---- in the engine's thread

    def _serve(self, is_ready: Callable[[], None]) -> None:
        self._carrier = choose_carrier(self._settings.kv_transport)
        self._peers = PeerTransport(self._peer_handle, self._carrier)
        with without_compiler():
            core = load_engine(self._settings.engine, transport=self._peers)
        self._blocks = core.blocks
        runner = core.runner
        assert isinstance(runner, ModelRunner), "from_config loads one"
        if isinstance(runner, TensorParallelRunner):
            runner.watch(lambda reason: os._exit(1))  # Serve starts another replica
        self._layout: KVLayout = runner.kv_layout
        max_blocks = max(1, self._settings.engine.scheduler.max_tokens_per_step // runner.block_size)
        self._exporter = BlockExporter(runner, max_blocks, self._post)
        core.on_computed = self._exporter.collect
        reporter = StatusReporter(self._report, core.blocks)
        self._loop = EngineLoop(core, self._emit, reporter=reporter)
        self._peers.open(self._layout, runner.device, on_news=self._loop.wake)
        is_ready()
        self._loop.run()

    def _copy(self, request_id: str, order: FetchOrder) -> None:
        found = self._blocks.cached_blocks(TokenBlocks(list(order.token_ids), order.cache_salt))
        self._exporter.export(request_id, order.first_block, found[order.first_block :])
        num_blocks = len(order.token_ids) // self._layout.block_size
        if len(found) == num_blocks:
            self._post(TokenChunk(request_id, (), finish_reason=FinishReason.LENGTH))  # all wanted blocks are exported
            return
        missing = UnavailableError(f"{len(found)} of the prompt's first {num_blocks} blocks are cached there")
        self._post(Refused.of(request_id, missing))

    def _emit(self, output: StepOutput | Refused) -> None:
        if isinstance(output, Refused):
            self._post(output)
            return
        for chunk in output.chunks:
            if chunk.finish_reason is not None:
                self._post(chunk)

    def _report(self, message: Status | Snapshot) -> None:
        self._call(lambda: self._reporter.take(message))

    def _post(self, event: _Event) -> None:
        self._call(lambda: self._deliver(event))

    def _call(self, act: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the replica is shutting down, and its event loop has stopped
            self._event_loop.call_soon_threadsafe(act)

    def _deliver(self, event: _Event) -> None:
        events = self._events.get(event.request_id)
        if events is not None:  # else the order was cancelled
            events.put_nowait(event)


def _request(request_id: str, order: FetchOrder) -> GenerateRequest:
    return GenerateRequest(
        request_id, order.token_ids, _SAMPLING, cache_salt=order.cache_salt, timeout_s=order.timeout_s
    )
