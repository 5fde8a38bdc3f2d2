"""A prefill replica without Ray: its replies, and how long it keeps blocks for a pair to fetch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import actors.prefill_engine
from actors.kv_transport import DirectBlocks, PrefillReply
from actors.prefill_engine import PrefillEngine
from actors.settings import PrefillSettings
from engine.accounting.engine_stats import FetchFailure
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.engine_core import EngineCore
from engine.remote_prefill.kv_transfer import ChunkHeader, FetchAccepted, FetchEnd, FetchOrder, KVLayout
from protos.block_keys import PrefixHolder, WorkerReport, block_keys, root_key, split_keys
from tests.engine.fixtures.checkpoints import write_checkpoint

PROMPT = tuple(3 + index % 50 for index in range(96))  # six blocks, two to a chunk
TIMEOUT_S = 30.0
ORDER = FetchOrder(7, "a", PROMPT, 0, "", TIMEOUT_S)


class FakeCarrier:
    """Keeps sent blocks until they are released; `may_send` delays sending."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}
        self.num_sent = 0
        self.num_released = 0
        self.may_send = threading.Event()
        self.may_send.set()

    @property
    def stats(self) -> tuple[int, int]:
        return self.num_sent, 0

    def send(self, blocks: Tensor) -> DirectBlocks:
        self.num_sent += 1
        key = str(self.num_sent)
        self.may_send.wait(TIMEOUT_S)
        self.kept[key] = blocks
        return DirectBlocks(key, None)

    def release(self, sent: DirectBlocks) -> None:
        del self.kept[sent.key]
        self.num_released += 1


class PrefillIndex:
    """Keeps the reports."""

    def __init__(self) -> None:
        self.reports: list[WorkerReport] = []

    async def report(self, report: WorkerReport) -> bool:
        self.reports.append(report)
        return False

    @property
    def keys(self) -> set[bytes]:
        """Keys that the reports list as cached."""
        kept: set[bytes] = set()
        for report in self.reports:
            kept |= set(split_keys(report.snapshot or b""))
            for delta in report.deltas:
                kept = (kept | set(split_keys(delta.stored))) - set(split_keys(delta.removed))
        return kept


@pytest.fixture
def index() -> PrefillIndex:
    return PrefillIndex()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_checkpoint(folder, seed=0)
    return folder


@pytest.fixture
def carrier(monkeypatch: pytest.MonkeyPatch) -> FakeCarrier:
    fake = FakeCarrier()
    monkeypatch.setattr(actors.prefill_engine, "choose_carrier", lambda kind: fake)
    return fake


class PeerHandle:
    """A handle that copies from `peer`, for callers in other event loops than the peer's."""

    def __init__(self) -> None:
        self.peer: PrefillEngine | None = None
        self.holder_ids: list[str] = []
        self._event_loop = asyncio.get_running_loop()

    def options(self, **options: object) -> PeerHandle:
        assert options["method_name"] == "copy"
        return self

    def remote(self, order: FetchOrder, layout: KVLayout, use_direct: bool, holder_id: str) -> PeerHandle:
        assert self.peer is not None
        self.holder_ids.append(holder_id)
        self._replies = self.peer.copy(order, layout, use_direct=False)
        return self

    def __aiter__(self) -> PeerHandle:
        return self

    async def __anext__(self) -> PrefillReply:
        coming = anext(self._replies, None)
        reply = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coming, self._event_loop))
        if reply is None:
            raise StopAsyncIteration
        return reply

    def cancel(self) -> None:
        asyncio.run_coroutine_threadsafe(self._replies.aclose(), self._event_loop)


@asynccontextmanager
async def started(target: Path, name: str, index: PrefillIndex, peers: PeerHandle) -> AsyncIterator[PrefillEngine]:
    model = ModelConfig(str(target), dtype="float32", num_threads=1)
    cache, limits = CacheConfig(num_blocks=64, memory_bytes=None), SchedulerConfig(max_tokens_per_step=32)
    config = EngineConfig(model, cache, limits, min_remote_prefill_tokens=32)
    replica = PrefillEngine(PrefillSettings(config), name, index, cast(Any, peers))
    await replica.wait_ready()
    yield replica
    replica._reporting.cancel()
    replica._loop.close()


@pytest.fixture
async def engine(target: Path, carrier: FakeCarrier, index: PrefillIndex) -> AsyncIterator[PrefillEngine]:
    async with started(target, "replica", index, PeerHandle()) as replica:
        yield replica


async def until(is_so) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not is_so():  # noqa: ASYNC110  # threads have nothing to signal
            await asyncio.sleep(0.005)


async def replies_of(engine: PrefillEngine, order: FetchOrder = ORDER, use_direct: bool = False) -> list[PrefillReply]:
    return [reply async for reply in engine.prefill(order, engine._layout, use_direct)]


async def test_blocks_come_in_order_each_after_its_header(engine: PrefillEngine) -> None:
    accepted, *middle, done = await replies_of(engine)
    assert isinstance(accepted, FetchAccepted)
    assert done == FetchEnd(7)
    announced, blocks = middle[::2], middle[1::2]
    assert [each.first_block for each in announced if isinstance(each, ChunkHeader)] == [0, 2, 4]
    assert all(isinstance(each, np.ndarray) and len(each) == 2 for each in blocks)
    assert not engine._events


async def test_direct_blocks_equal_sent_ones_and_are_kept_until_the_reader_leaves(
    engine: PrefillEngine, carrier: FakeCarrier
) -> None:
    by_value = await replies_of(engine)
    sent = [each for each in by_value if isinstance(each, np.ndarray)]
    async with aclosing(engine.prefill(ORDER, engine._layout, use_direct=True)) as replies:
        async for reply in replies:
            if isinstance(reply, FetchEnd):
                break
        assert torch.equal(torch.cat(list(carrier.kept.values())), torch.from_numpy(np.concatenate(sent)))
    await until(lambda: not carrier.kept)


async def test_direct_blocks_are_freed_after_the_orders_time_if_the_reader_stays(
    engine: PrefillEngine, carrier: FakeCarrier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.prefill_engine, "_GRACE_S", 0.01)
    await replies_of(engine, replace(ORDER, timeout_s=1.0), use_direct=True)
    assert carrier.num_sent > 0
    await until(lambda: not carrier.kept)


async def test_blocks_registered_after_their_reader_left_are_released(
    engine: PrefillEngine, carrier: FakeCarrier
) -> None:
    carrier.may_send.clear()
    reading = asyncio.create_task(replies_of(engine, use_direct=True))
    await until(lambda: carrier.num_sent == 1)
    reading.cancel()
    await asyncio.wait([reading])
    carrier.may_send.set()
    await until(lambda: carrier.num_released == 1)
    assert not carrier.kept


async def test_another_layout_is_refused_and_both_values_named(engine: PrefillEngine) -> None:
    theirs = replace(engine._layout, dtype="torch.bfloat16")
    assert [reply async for reply in engine.prefill(ORDER, theirs, use_direct=False)] == [
        FetchEnd(7, FetchFailure.MISMATCH, "dtype is torch.float32 here and torch.bfloat16 there")
    ]


async def test_the_index_learns_the_blocks_that_a_replica_holds_and_its_queue(
    engine: PrefillEngine, index: PrefillIndex
):
    await replies_of(engine)
    expected = set(block_keys(PROMPT, 16, root_key(engine._layout.model_version)))
    await until(lambda: expected <= index.keys)
    await until(lambda: index.reports[-1].load.queued_prefill_tokens == 0)
    assert index.reports[-1].load.worker_id == "replica"
    assert index.reports[-1].load.prefill_tokens_per_s > 0


def values(replies: list[PrefillReply]) -> np.ndarray:
    return np.concatenate([each for each in replies if isinstance(each, np.ndarray)]).view(np.float32)


LONGER = replace(ORDER, fetch_id=8, token_ids=PROMPT + tuple(range(5, 37)))  # two blocks after the blocks of `PROMPT`


async def test_a_prefix_that_another_replica_holds_is_copied_and_the_rest_computed(
    engine: PrefillEngine, target: Path, carrier: FakeCarrier
) -> None:
    alone = values(await replies_of(engine, LONGER))
    handle = PeerHandle()
    async with (
        started(target, "first", PrefillIndex(), handle) as first,
        started(target, "second", PrefillIndex(), handle) as second,
    ):
        handle.peer = first
        await replies_of(first)
        both = values([each async for each in second.prefill(LONGER, second._layout, False, PrefixHolder("first", 6))])
        assert np.allclose(both, alone, atol=1e-5)
        await until(lambda: second.stats.remote.num_tokens == 96)
        assert handle.holder_ids == ["first"]
        assert not second.stats.remote.failures
        assert second.stats.num_prefix_hit_tokens == 0, "so it computed the other 32"
        assert first.stats.num_prefix_queried_tokens == 96, "nothing was queued there"


async def test_what_a_holder_has_lost_is_computed(engine: PrefillEngine, target: Path, carrier: FakeCarrier) -> None:
    handle = PeerHandle()
    async with (
        started(target, "first", PrefillIndex(), handle) as first,
        started(target, "second", PrefillIndex(), handle) as second,
    ):
        handle.peer = first
        await replies_of(first, replace(ORDER, token_ids=PROMPT[:64]))
        some = [each async for each in second.prefill(LONGER, second._layout, False, PrefixHolder("first", 6))]
        assert np.allclose(values(some), values(await replies_of(engine, LONGER)), atol=1e-5)
        assert some[-1] == FetchEnd(8)
        await until(lambda: second.stats.remote.num_tokens == 64)
        assert second.stats.remote.failures == {FetchFailure.REFUSED: 1}


async def test_a_replica_copies_nothing_from_itself(engine: PrefillEngine) -> None:
    await replies_of(engine)
    again = [each async for each in engine.prefill(LONGER, engine._layout, False, PrefixHolder("replica", 6))]
    assert again[-1] == FetchEnd(8)
    await until(lambda: engine.stats.num_prefix_hit_tokens == 96)
    assert engine.stats.remote.num_fetches == 0


async def test_a_tenant_s_blocks_are_kept_under_its_salt_and_serve_no_other(
    engine: PrefillEngine, index: PrefillIndex
) -> None:
    salted = replace(ORDER, cache_salt="of one tenant")
    await replies_of(engine, salted)
    expected = set(block_keys(PROMPT, 16, root_key(engine._layout.model_version, "of one tenant")))
    await until(lambda: expected <= index.keys)
    assert engine.stats.num_prefix_hit_tokens == 0
    for salt in ("", "of another"):
        await replies_of(engine, replace(ORDER, cache_salt=salt))
        assert engine.stats.num_prefix_hit_tokens == 0
        refused = [each async for each in engine.copy(replace(ORDER, cache_salt=salt + "!"), engine._layout, False)]
        assert refused[-1].failure is FetchFailure.REFUSED
    copied = [each async for each in engine.copy(salted, engine._layout, False)]
    assert np.array_equal(values(copied), values(await replies_of(engine, salted)))


@pytest.mark.parametrize("num_read", [1, 3])
async def test_an_order_that_is_given_up_leaves_an_idle_engine_and_every_block_free(
    engine: PrefillEngine, num_read: int
) -> None:
    """The reader leaves once the order is accepted, or after its first blocks; most of the prompt is left then."""
    core, may_step = engine._loop._engine, threading.Semaphore(2)
    assert isinstance(core, EngineCore)
    step = core.step
    core.step = lambda: step() if may_step.acquire() else []  # type: ignore[method-assign]
    order = replace(ORDER, token_ids=tuple(range(1, 64)) * 7)
    replies = engine.prefill(order, engine._layout, use_direct=False)
    for _ in range(num_read):
        await anext(replies)
    await until(lambda: core.has_work)
    assert engine.num_requests == 1
    await replies.aclose()
    assert engine.num_requests == 0
    may_step.release(1000)
    await until(lambda: not core.has_work)
    core.scheduler.check_integrity()
    core.blocks.check_integrity([])
    assert core.blocks.num_free_blocks == core.blocks.num_blocks
    assert not engine._events
    assert not engine._exporter._next_blocks
    assert core.stats().times.num_steps < 6
    assert [type(reply) for reply in await replies_of(engine)][-1] is FetchEnd
