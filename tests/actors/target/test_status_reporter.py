"""Frames about the target itself: when one is sent to the shell, and the changes of the cache in it."""

from actors.shell_messages import Snapshot, Status
from actors.target.engine_loop import StatusReporter
from engine.accounting.engine_stats import DraftStats, EngineStats
from engine.accounting.step_times import StepTimes
from engine.kv_cache.block_manager import CacheDeltaSink
from protos.block_keys import CacheDelta

A, B, C = (bytes([n]) * 16 for n in (1, 2, 3))


class CacheOfASet:
    """The part of a block manager that a reporter needs."""

    def __init__(self) -> None:
        self.cached_keys: set[bytes] = set()
        self.add: CacheDeltaSink = lambda delta: None

    def add_sink(self, sink: CacheDeltaSink) -> None:
        self.add = sink


class ReportingTarget:
    """A reporter with a clock by hand and a cache of a set."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.sent: list[Status | Snapshot] = []
        self.blocks = CacheOfASet()
        self.reporter = StatusReporter(self.sent.append, self.blocks, lambda: self.now_s)  # type: ignore[arg-type]

    def turn(self, num_running: int) -> None:
        self.reporter.report(EngineStats(num_running, 0, 0, 0, 8, 0, 0, 0, 0, DraftStats(), StepTimes()))


def summed(*deltas: CacheDelta) -> CacheDelta:
    """Return the one change that a frame reports for several."""
    target = ReportingTarget()
    target.turn(1)
    for delta in deltas:
        target.blocks.add(delta)
    target.turn(1)
    target.turn(1)  # nothing is reported twice
    _, status = target.sent
    assert isinstance(status, Status)
    return status.cache


def test_deltas_of_several_steps_become_one():
    steps = CacheDelta(stored=A), CacheDelta(stored=B), CacheDelta(removed=C)
    assert summed(*steps) == CacheDelta(stored=A + B, removed=C)


def test_the_latest_delta_of_a_block_counts():
    steps = CacheDelta(stored=A), CacheDelta(removed=A), CacheDelta(removed=B), CacheDelta(stored=B)
    assert summed(*steps) == CacheDelta(stored=B, removed=A)


def test_a_delta_with_both_kinds_is_taken_in_whole():
    assert summed(CacheDelta(stored=A), CacheDelta(stored=B, removed=A)) == CacheDelta(stored=B, removed=A)


def test_a_cleared_cache_keeps_only_what_came_after():
    steps = CacheDelta(stored=A), CacheDelta(is_cleared=True), CacheDelta(stored=B)
    assert summed(*steps) == CacheDelta(stored=B, is_cleared=True)


def test_a_cleared_cache_alone_is_reported():
    assert summed(CacheDelta(is_cleared=True)) == CacheDelta(is_cleared=True)


def test_an_unchanged_status_is_not_repeated():
    target = ReportingTarget()
    for _ in range(3):
        target.turn(1)
        target.now_s += 1.0
    assert len(target.sent) == 1


def test_changes_and_events_are_sent_with_their_time() -> None:
    target = ReportingTarget()
    for number in range(3):
        target.blocks.add(CacheDelta(stored=bytes([number]) * 16))
        target.turn(number)
        target.now_s += 1.0
    sent = [status for status in target.sent if isinstance(status, Status)]
    assert [(each.measured_at_s, each.engine.num_running) for each in sent] == [(100.0, 0), (101.0, 1), (102.0, 2)]
    assert [each.cache.stored for each in sent] == [bytes([number]) * 16 for number in range(3)]


def test_a_snapshot_covers_the_changes_before_it():
    target = ReportingTarget()
    target.blocks.cached_keys = {A}
    target.blocks.add(CacheDelta(stored=A))
    target.reporter.send_snapshot()
    target.blocks.add(CacheDelta(removed=A))
    target.turn(0)
    snapshot, status = target.sent
    assert isinstance(snapshot, Snapshot)
    assert isinstance(status, Status)
    assert (snapshot.keys, status.cache.stored, status.cache.removed) == (A, b"", A)
