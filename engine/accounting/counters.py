"""Sums since the start: the times of steps, and the outcomes of drafts in all and by method and class of requests."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from typing import NamedTuple

from engine.accounting.drift import DriftMonitor, DriftStats
from engine.accounting.engine_stats import ClassStats, DraftStats
from engine.accounting.record import PassRecord, SequencePass
from engine.accounting.request_limits import is_adaptive
from engine.accounting.step_times import StepTimes
from engine.config import SpeculationConfig
from engine.sequence.batch import CheckedDraft
from engine.sequence.sequence import RequestTokens
from protos.messages import SpeculationMethod, has_own_weights

_OWN_METHODS = tuple(filter(has_own_weights, SpeculationMethod))


class _Outcome(NamedTuple):
    """The outcome of a pass, as far as it is counted. Hundreds of rows have few distinct outcomes."""

    method: str
    name: str
    num_drafts: int
    depth: int
    num_forced: int
    num_accepted: int


class TimeTotals:
    """The parts of the last step, and of all steps together."""

    def __init__(self) -> None:
        self.last = StepTimes()
        self.total = StepTimes()

    def on_pass(self, record: PassRecord) -> None:
        """Add a pass."""
        self.last = record.times
        self.total += record.times


class DraftCounters:
    """The draft counters of an engine. All but the shapes leave out passes without drafts or that are not exact."""

    def __init__(self, config: SpeculationConfig) -> None:
        own = (each for each in config.methods if each in _OWN_METHODS)
        self._own_method = next(own, SpeculationMethod.MODEL)
        # Adaptive suffix drafts are chosen by load, so a change of their acceptance is no drift.
        self._priced = (SpeculationMethod.SUFFIX,) if is_adaptive(config) else ()
        self._num_drafts = self._num_draft_tokens = self._num_accepted_tokens = self._num_invalid_tokens = 0
        self._per_pos: list[int] = []
        self._shapes: Counter[str] = Counter()
        self._classes: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        self._drift = DriftMonitor()

    @property
    def drafts(self) -> DraftStats:
        """The sums over all drafts."""
        return DraftStats(
            self._num_drafts,
            self._num_draft_tokens,
            self._num_accepted_tokens,
            tuple(self._per_pos),
            self._num_invalid_tokens,
            dict(self._shapes),
        )

    @property
    def classes(self) -> tuple[ClassStats, ...]:
        """The sums by method and class."""
        return tuple(
            ClassStats(method, name, tuple(drafted), tuple(accepted))
            for (method, name), (drafted, accepted) in self._classes.items()
        )

    @property
    def drift(self) -> tuple[DriftStats, ...]:
        """The state of each class's drift detector."""
        return self._drift.snapshot()

    def method_of(self, draft: CheckedDraft, sequence: RequestTokens) -> str:
        """Return the draft's source: matched text, or a model or head. Hybrids default to the deployment's own."""
        is_named = sequence.method not in (SpeculationMethod.HYBRID, SpeculationMethod.NONE)
        return str(draft.draft.source or (sequence.method if is_named else self._own_method))

    def on_pass(self, record: PassRecord) -> None:
        """Count a pass."""
        self._shapes.update([each.draft.shape for each in record.passes])
        drafted = [each for each in record.passes if each.outcome.is_exact and each.draft.num_valid > 0]
        for outcome, count in Counter(map(self._outcome_of, drafted)).items():
            self._count(outcome, count)
        self._num_invalid_tokens += sum([each.draft.has_unknown for each in record.passes])
        self._drift.end_step()

    def _outcome_of(self, each: SequencePass) -> _Outcome:
        scheduled, draft, outcome = each
        method, name = self.method_of(draft, scheduled.sequence), class_name(scheduled.sequence)
        return _Outcome(method, name, draft.num_valid, draft.depth, draft.num_forced, outcome.num_accepted)

    def _count(self, outcome: _Outcome, count: int) -> None:
        self._num_drafts += count
        self._num_draft_tokens += count * outcome.num_drafts
        self._num_accepted_tokens += count * outcome.num_accepted
        self._per_pos = _added(self._per_pos, outcome.num_accepted, outcome.depth, count)
        # Tokens that the grammar forced are no evidence about the method that drafted before them.
        num_own = outcome.depth - outcome.num_forced
        if num_own <= 0:
            return
        key = (outcome.method, outcome.name)
        drafted, accepted = self._classes.get(key, ([], []))
        self._classes[key] = (
            _added(drafted, num_own, num_own, count),
            _added(accepted, min(outcome.num_accepted, num_own), num_own, count),
        )
        if outcome.method not in self._priced:
            self._drift.record("-".join(key), outcome.num_accepted > 0, count)


def class_name(sequence: RequestTokens) -> str:
    """Return the class of a request: greedy or sampled, free or structured."""
    sampling = "greedy" if sequence.is_greedy else "sampled"
    return f"{sampling}-{'free' if sequence.matcher is None else 'structured'}"


def _added(counts: list[int], number: int, length: int, count: int) -> list[int]:
    """Return `counts` with `count` added to the first `number` positions, for at least `length` positions."""
    added = [count if position < number else 0 for position in range(length)]
    return [old + new for old, new in zip_longest(counts, added, fillvalue=0)]
