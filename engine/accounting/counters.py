"""Sums since the start: the times of steps, and the outcomes of drafts in all and by method and class of requests."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest
from operator import add
from typing import NamedTuple

from engine.accounting.drift import DriftDetector, DriftStats
from engine.accounting.engine_stats import ClassStats, DraftStats
from engine.accounting.record import PassRecord
from engine.accounting.request_limits import is_adaptive
from engine.accounting.step_times import StepTimes
from engine.config import SpeculationConfig
from engine.sequence.batch import CheckedDraft
from engine.sequence.sequence import RequestTokens, kind_of
from protos.messages import SpeculationMethod, has_own_weights

_OWN_METHODS = tuple(filter(has_own_weights, SpeculationMethod))


class _Kind(NamedTuple):
    """The names of a draft's method and class, in parts."""

    source: str | None
    method: str
    is_greedy: bool
    is_free: bool


class _Outcome(NamedTuple):
    """The outcome of a pass, as far as it is counted. Hundreds of rows have few distinct outcomes."""

    kind: _Kind
    num_drafts: int
    depth: int
    num_forced: int
    num_accepted: int


class TimeTotals:
    """The parts of the last step, and of all steps together."""

    def __init__(self) -> None:
        self.last = StepTimes()
        self._sums = self.last.parts

    @property
    def total(self) -> StepTimes:
        """The sums of all steps."""
        return StepTimes(*self._sums)

    def on_pass(self, record: PassRecord) -> None:
        """Add a pass."""
        self.last = record.times
        self._sums = (*map(add, self._sums, record.times.parts),)


class DraftCounters:
    """The draft counters of an engine. All but the shapes leave out passes without drafts or that are not exact.

    A pass only counts its distinct outcomes; the sums are made when they are read.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        own = (each for each in config.methods if each in _OWN_METHODS)
        self._own_method = next(own, SpeculationMethod.MODEL)
        # Adaptive suffix drafts are chosen by load, so a change of their acceptance is no drift.
        self._priced = (SpeculationMethod.SUFFIX,) if is_adaptive(config) else ()
        self._num_drafts = self._num_draft_tokens = self._num_accepted_tokens = self._num_invalid_tokens = 0
        self._per_pos: list[int] = []
        self._shapes: Counter[str] = Counter()
        self._classes: dict[tuple[str, str], tuple[list[int], list[int]]] = {}
        self._detectors: dict[str, DriftDetector] = {}  # by method and class
        self._outcomes: Counter[_Outcome] = Counter()  # since the sums were read

    @property
    def drafts(self) -> DraftStats:
        """The sums over all drafts."""
        self._sum_up()
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
        self._sum_up()
        return tuple(
            ClassStats(method, name, tuple(drafted), tuple(accepted))
            for (method, name), (drafted, accepted) in self._classes.items()
        )

    @property
    def drift(self) -> tuple[DriftStats, ...]:
        """The state of each class's drift detector."""
        return tuple(each.stats for each in self._detectors.values())

    def method_of(self, draft: CheckedDraft, sequence: RequestTokens) -> str:
        """Return the draft's source: matched text, or a model or head. Hybrids default to the deployment's own."""
        return self._method(draft.draft.source, sequence.method)

    def _method(self, source: str | None, method: str) -> str:
        is_named = method not in (SpeculationMethod.HYBRID, SpeculationMethod.NONE)
        return str(source or (method if is_named else self._own_method))

    def on_pass(self, record: PassRecord) -> None:
        """Count a pass."""
        firsts: dict[_Kind, list[int]] = {}  # drafts at the first position, and accepted ones
        for scheduled, draft, outcome in record.passes:
            self._shapes[draft.shape] += 1
            self._num_invalid_tokens += draft.has_unknown
            if draft.num_valid == 0 or not outcome.is_exact:
                continue
            sequence, depth = scheduled.sequence, draft.depth
            kind = _Kind(draft.draft.source, sequence.method, sequence.is_greedy, sequence.matcher is None)
            self._outcomes[_Outcome(kind, draft.num_valid, depth, draft.num_forced, outcome.num_accepted)] += 1
            if depth > draft.num_forced:
                counts = firsts.setdefault(kind, [0, 0])
                counts[0] += 1
                counts[1] += outcome.num_accepted > 0
        for kind, counts in firsts.items():
            method, name = self._class_of(kind)
            if method not in self._priced:
                self._detector(f"{method}-{name}").observe(*counts)

    def _detector(self, name: str) -> DriftDetector:
        if name not in self._detectors:
            self._detectors[name] = DriftDetector(name)
        return self._detectors[name]

    def _sum_up(self) -> None:
        for outcome, count in self._outcomes.items():
            self._count(outcome, count)
        self._outcomes.clear()

    def _class_of(self, kind: _Kind) -> tuple[str, str]:
        """Return the method, and the class of the request: greedy or sampled, free or structured."""
        return self._method(kind.source, kind.method), _name_of(is_greedy=kind.is_greedy, is_free=kind.is_free)

    def _count(self, outcome: _Outcome, count: int) -> None:
        self._num_drafts += count
        self._num_draft_tokens += count * outcome.num_drafts
        self._num_accepted_tokens += count * outcome.num_accepted
        self._per_pos = _added(self._per_pos, outcome.num_accepted, outcome.depth, count)
        # Tokens that the grammar forced are no evidence about the method that drafted before them.
        num_own = outcome.depth - outcome.num_forced
        if num_own <= 0:
            return
        key = self._class_of(outcome.kind)
        drafted, accepted = self._classes.get(key, ([], []))
        self._classes[key] = (
            _added(drafted, num_own, num_own, count),
            _added(accepted, min(outcome.num_accepted, num_own), num_own, count),
        )


def class_name(sequence: RequestTokens) -> str:
    """Return the class of a request: greedy or sampled, free or structured."""
    return _name_of(is_greedy=sequence.is_greedy, is_free=sequence.matcher is None)


def _name_of(*, is_greedy: bool, is_free: bool) -> str:
    return f"{kind_of(is_greedy=is_greedy)}-{'free' if is_free else 'structured'}"


def _added(counts: list[int], number: int, length: int, count: int) -> list[int]:
    """Return `counts` with `count` added to the first `number` positions, for at least `length` positions."""
    added = [count if position < number else 0 for position in range(length)]
    return [old + new for old, new in zip_longest(counts, added, fillvalue=0)]
