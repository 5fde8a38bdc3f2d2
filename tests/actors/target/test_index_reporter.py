"""A pair and the router's index, with each of them dying: in the end the index equals the target's cache."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

import actors.target.index_reporter
from actors.shell_messages import Snapshot, Status
from actors.target.index_reporter import IndexReporter
from engine.accounting.engine_stats import DraftStats, EngineStats
from engine.accounting.step_times import StepTimes
from protos.block_keys import CacheDelta, WorkerReport, join_keys, split_keys
from protos.errors import UnavailableError

KEYS = [bytes([n]) * 16 for n in range(10)]


class RecordingIndex:
    """Keeps the set of keys that the reports add up to, and asks for a snapshot after a hole."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()
        self.reports: list[WorkerReport] = []
        self.is_down = False
        self._next: tuple[int, int] = (-1, 0)  # epoch, sequence
        self._is_behind = False

    def restart(self) -> None:
        self.held, self._next, self._is_behind = set(), (-1, 0), False

    async def report(self, report: WorkerReport) -> bool:
        if self.is_down:
            raise UnavailableError("down")
        self.reports.append(report)
        epoch, sequence = self._next if self._next[0] == report.load.epoch else (report.load.epoch, 0)
        if report.snapshot is not None:
            self.held, self._is_behind = set(split_keys(report.snapshot)), False
        elif report.sequence != sequence:
            self._is_behind = True
        self._next = (epoch, report.sequence + 1)
        for delta in report.deltas:
            held = set() if delta.is_cleared else self.held
            self.held = held - set(split_keys(delta.removed)) | set(split_keys(delta.stored))
        return self._is_behind


class FakeTarget:
    """A cache that calls the reporter as a `TargetClient` does."""

    def __init__(self, reporter: IndexReporter) -> None:
        self.reporter = reporter
        self.keys: list[bytes] = []
        self.num_requests = 1
        self.num_snapshots = 0

    def start(self) -> None:
        self.reporter.on_ready()

    def die(self) -> None:
        self.keys = []
        self.reporter.take(None)

    def store(self, *keys: bytes) -> None:
        self.keys += keys
        stats = EngineStats(1, 0, 70, 30, 8, 0, 0, 0, 0, DraftStats(), StepTimes(), 500.0)
        self.reporter.take(Status(90.0, stats, CacheDelta(join_keys(keys))))

    def ask_snapshot(self) -> None:
        self.num_snapshots += 1
        asyncio.get_running_loop().call_soon(self.reporter.take, Snapshot(join_keys(self.keys)))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors.target.index_reporter, "_INTERVAL_S", 0.001)
    monkeypatch.setattr(actors.target.index_reporter, "_HEARTBEAT_S", 0.01)


@asynccontextmanager
async def running() -> AsyncIterator[tuple[RecordingIndex, FakeTarget]]:
    index = RecordingIndex()
    reporter = IndexReporter("w", index, clock=lambda: 100.0)
    target = FakeTarget(reporter)
    task = asyncio.create_task(reporter.run(target.ask_snapshot, lambda: target.num_requests))
    target.start()
    try:
        yield index, target
    finally:
        task.cancel()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110  # the fakes have nothing to signal
            await asyncio.sleep(0.002)


async def test_a_pair_starts_with_a_snapshot_and_goes_on_with_changes():
    async with running() as (index, target):
        target.keys = KEYS[:2]
        await until(lambda: index.held == set(KEYS[:2]))
        target.store(*KEYS[2:4])
        await until(lambda: index.held == set(KEYS[:4]))
        assert target.num_snapshots == 1


async def test_load_carries_its_age_and_not_its_clock():
    async with running() as (index, target):
        target.store(KEYS[0])
        await until(lambda: bool(index.reports) and index.reports[-1].load.queued_prefill_tokens == 70)
        report = index.reports[-1]
        assert report.load_age_s == 10.0
        assert (report.load.worker_id, report.load.running_decode_tokens, report.load.prefill_tokens_per_s) == (
            "w",
            30,
            500.0,
        )


async def test_a_restarted_index_gets_a_snapshot():
    async with running() as (index, target):
        target.store(*KEYS[:3])
        await until(lambda: index.held == set(KEYS[:3]))
        index.restart()
        await until(lambda: index.held == set(KEYS[:3]))
        assert target.num_snapshots == 2


async def test_changes_while_the_index_is_down_reach_it_afterwards():
    async with running() as (index, target):
        await until(lambda: len(index.reports) > 2)
        index.is_down = True
        target.store(*KEYS[:3])
        await asyncio.sleep(0.02)
        index.is_down = False
        target.store(KEYS[3])
        await until(lambda: index.held == set(KEYS[:4]))


async def test_a_dead_targets_blocks_vanish_at_once_and_it_is_not_serving():
    async with running() as (index, target):
        target.store(*KEYS[:3])
        await until(lambda: index.held == set(KEYS[:3]))
        target.die()
        await until(lambda: not index.held)
        assert not index.reports[-1].is_serving
        target.start()
        target.store(KEYS[5])
        await until(lambda: index.held == {KEYS[5]})
        assert index.reports[-1].is_serving
        assert index.reports[-1].load.epoch == 2


async def test_changes_wait_for_the_next_report_and_the_end_of_a_target_does_not(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(actors.target.index_reporter, "_INTERVAL_S", 60.0)
    async with running() as (index, target):
        target.keys = KEYS[:2]
        await until(lambda: index.held == set(KEYS[:2]))
        num_reports = len(index.reports)
        target.store(KEYS[2])
        target.store(KEYS[3])
        await asyncio.sleep(0.05)
        assert len(index.reports) == num_reports
        target.die()
        await until(lambda: not index.held)
        target.keys = KEYS[5:7]
        target.start()
        await until(lambda: index.held == set(KEYS[5:7]))


async def test_a_pair_without_news_still_reports():
    async with running() as (index, _target):
        await until(lambda: len(index.reports) > 5)
        assert [report.sequence for report in index.reports] == list(range(len(index.reports)))


async def test_an_idle_pairs_load_is_always_fresh_and_a_busy_ones_ages():
    async with running() as (index, target):
        idle = EngineStats(0, 0, 0, 0, 8, 0, 0, 0, 0, DraftStats(), StepTimes())
        target.reporter.take(Status(40.0, idle, CacheDelta()))
        await until(lambda: bool(index.reports) and index.reports[-1].load_age_s == 60.0)  # a request is on its way
        target.num_requests = 0
        await until(lambda: index.reports[-1].load_age_s == 0.0)
        target.store(KEYS[0])
        await until(lambda: index.reports[-1].load_age_s == 10.0)


def test_work_is_queued_prompts_in_seconds_and_the_time_of_a_running_token():
    reporter = IndexReporter("w", RecordingIndex())
    assert reporter.work == {"queued_prefill_s": 0.0, "token_s": 0.0}
    stats = EngineStats(1, 0, 70, 30, 8, 0, 0, 0, 0, DraftStats(), StepTimes(), 500.0, 0.0, 40.0)
    reporter.take(Status(90.0, stats, CacheDelta()))
    assert reporter.work == {"queued_prefill_s": 0.14, "token_s": 0.025}
    reporter.take(Status(91.0, replace(stats, num_running_decode_tokens=0), CacheDelta()))
    assert reporter.work["token_s"] == 0.0
