"""Pauses after failures, on a clock that is set by hand."""

from protos.backoff import Backoff, BackoffGate


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_pause_doubles_up_to_the_longest_and_starts_over_after_a_success():
    backoff = Backoff(1.0, 5.0)
    assert [backoff.next() for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
    backoff.reset()
    assert backoff.next() == 1.0


def test_failures_during_a_pause_count_as_one():
    clock = Clock()
    gate = BackoffGate(1.0, 30.0, clock)
    assert gate.is_open
    for _ in range(5):
        gate.failed()
    clock.now_s += 0.9
    assert not gate.is_open
    clock.now_s += 0.1
    assert gate.is_open
    gate.failed()
    clock.now_s += 1.9
    assert not gate.is_open


def test_a_success_opens_the_gate_at_once():
    gate = BackoffGate(1.0, 30.0, Clock())
    gate.failed()
    gate.succeeded()
    assert gate.is_open
