"""A fall of acceptance is reported once."""

from __future__ import annotations

from actors.pair.pair_shell import DriftAlarms
from engine.accounting.drift import DriftStats

FALLEN = DriftStats("model-greedy-free", 0.41, 0.74, num_alarms=1, is_alarming=True)


def test_each_alarm_is_announced_once_and_stands_while_it_lasts() -> None:
    heard: list[str] = []
    alarms = DriftAlarms()
    alarms.on_alarm = heard.append
    for _ in range(3):
        alarms.update([FALLEN])
    assert alarms.ringing == ("acceptance of model-greedy-free is 0.410, and was 0.740",)
    assert heard == ["model-greedy-free"]
