"""Changes of a plan for one pass, now and then, to measure drafts that it would not have.

A plan may give all sequences length 0. Then a fixed share of the time goes to probes: a draft in each of two successive
passes, since the first also prefills the tokens that the draft has missed. With several draft models, one pass in a
while uses each of them alone. One draft in 64 of a class has its other shape, with as many rows: it costs a
64th of the better shape's gain.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from collections.abc import Sequence as Seq
from operator import xor

from engine.accounting.shape_choice import PlannedBatch

# Shares of time for measurements. More plans with measurements moved simulated goodput by 3% at most
# (bench/EXPERIMENTS.md).
_ALONE_PERIOD = 64  # steps between plans for a drafter to draft alone
_SHAPE_PERIOD = 64  # passes with drafts of a class between two with as many rows in its other shape
_DOUBT_PERIOD = 8  # the same while the other shape may be better, since few of its passes are known
_PROBE_SHARE = 0.005  # of the time is for probes of sequences without drafts
_PROBE_PERIODS = (60, 1000)  # fewest and most steps between two probes


class DraftProbes:
    """Changes planned drafts in place, for one pass."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._last_trial: dict[str, int] = {}  # class -> step of its last draft in its other shape, or of its first
        self._last_alone: dict[str, int] = {}  # drafter -> step of the last plan for it to draft alone
        self._probed: str | None = None  # request that has had the first pass of its probe
        self._next_probe = _PROBE_PERIODS[0]  # step
        self._probe_s = 0.0  # lost by the last probe

    def forget_draft(self) -> None:
        """Forget the present probe, since another draft model has replaced the probed one."""
        self._probed = None

    def try_other_shape(
        self, step: int, batch: PlannedBatch, lengths: Seq[int], is_tree: list[bool], doubtful: Container[str]
    ) -> bool:
        """Give each class that is due as many rows in its other shape. Changes `is_tree`; returns True if it does.

        `doubtful` are the classes whose other shape may be better.
        """
        drafts = zip(batch.names, batch.limits.trees, lengths, strict=True)
        due = set()
        for name in {name for name, size, length in drafts if size > 0 and length > 0}:
            period = _DOUBT_PERIOD if name in doubtful else _SHAPE_PERIOD
            if step - self._last_trial.setdefault(name, step) >= period:
                self._last_trial[name] = step
                due.add(name)
        if due:
            is_tree[:] = map(xor, is_tree, batch.limits.are_trees(batch.names, due))
        return bool(due)

    def let_one_draft_alone(self, step: int, drafters: Seq[str], lengths: list[int]) -> bool:
        """Let one of several drafters draft alone, to measure the cost of each. Changes `lengths`."""
        drafting = {drafter for drafter, length in zip(drafters, lengths, strict=True) if length > 0}
        if len(drafting) < 2:
            return False
        alone = min(sorted(drafting), key=lambda each: self._last_alone.get(each, -_ALONE_PERIOD))
        if step - self._last_alone.get(alone, -_ALONE_PERIOD) < _ALONE_PERIOD:
            return False
        self._last_alone[alone] = step
        lengths[:] = [length if each == alone else 0 for each, length in zip(drafters, lengths, strict=True)]
        return True

    def probe(self, step: int, last_drafted: Mapping[str, int], lengths: list[int], num_possible: Seq[int]) -> bool:
        """Give a draft to the sequence that has waited longest. Changes `lengths`.

        The same sequence also drafts in the next pass, which takes as long as an ordinary draft. `last_drafted` has the
        step of each sequence's last draft, by request id, in the order of `lengths`.
        """
        probed, self._probed = self._probed, None
        if probed is None and step < self._next_probe:
            return False
        sizes = zip(last_drafted, lengths, num_possible, strict=True)
        idle = {request_id: index for index, (request_id, length, most) in enumerate(sizes) if length == 0 < most}
        if probed in idle:
            lengths[idle[probed]] = min(self._length, num_possible[idle[probed]])
            return True
        has_ended = probed is not None and probed not in last_drafted  # then another request has the whole probe
        if idle and (has_ended or step >= self._next_probe):
            self._probed = min(idle, key=last_drafted.__getitem__)
            lengths[idle[self._probed]] = 1
            self._next_probe = step + _PROBE_PERIODS[0]  # until its cost is measured
            self._probe_s = 0.0
            return True
        return False

    def repeat(self, step: int, request_id: str) -> None:
        """Probe this request in the next pass too; another one if it has ended."""
        self._probed, self._next_probe = request_id, step

    def charge(self, step: int, lost_s: float, plain_s: float) -> None:
        """Let the next probe wait until the last one, with this pass, is a small share of the time."""
        self._probe_s += lost_s
        period = int(min(self._probe_s / (_PROBE_SHARE * plain_s), _PROBE_PERIODS[1]))
        self._next_probe = max(self._next_probe, step + period)
