"""Frames about the target itself: when one is sent to the shell, and which fields it omits."""

from actors.shell_messages import Snapshot, Status
from actors.target.engine_loop import KVEventBuffer, StatusReporter
from engine.accounting.engine_stats import DraftStats, EngineStats
from engine.accounting.step_times import StepTimes
from protos.block_keys import CacheDelta

A, B = (bytes([n]) * 16 for n in (1, 2))


class ReportingTarget:
    """A reporter with a clock by hand and a cache of a set."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.sent: list[Status | Snapshot] = []
        self.kv_events = KVEventBuffer()
        self.keys: set[bytes] = set()
        self.reporter = StatusReporter(self.sent.append, self.kv_events, lambda: self.keys, lambda: self.now_s)

    def turn(self, num_running: int) -> None:
        self.reporter.report(EngineStats(num_running, 0, 0, 0, 8, 0, 0, 0, 0, DraftStats(), StepTimes()))


def test_an_unchanged_status_is_not_repeated():
    target = ReportingTarget()
    for _ in range(3):
        target.turn(1)
        target.now_s += 1.0
    assert len(target.sent) == 1


def test_changes_and_events_are_sent_with_their_time() -> None:
    target = ReportingTarget()
    for number in range(3):
        target.kv_events.record(CacheDelta(stored=bytes([number]) * 16))
        target.turn(number)
        target.now_s += 1.0
    sent = [status for status in target.sent if isinstance(status, Status)]
    assert [(each.measured_at_s, each.engine.num_running) for each in sent] == [(100.0, 0), (101.0, 1), (102.0, 2)]
    assert [each.cache.stored for each in sent] == [bytes([number]) * 16 for number in range(3)]


def test_a_snapshot_covers_what_the_buffer_held():
    target = ReportingTarget()
    target.keys = {A}
    target.kv_events.record(CacheDelta(stored=A))
    target.reporter.send_snapshot()
    target.kv_events.record(CacheDelta(removed=A))
    target.turn(0)
    snapshot, status = target.sent
    assert isinstance(snapshot, Snapshot)
    assert isinstance(status, Status)
    assert (snapshot.keys, status.cache.stored, status.cache.removed) == (A, b"", A)
