"""One check's way to a verdict."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from cluster.cli.audit.evidence import FAULT_RATE, DrawEvidence, Evidence, HitEvidence, LeastEvidence
from cluster.cli.audit.prediction import Claim
from cluster.cli.audit.wire import Answer, Request


class Verdict(StrEnum):
    """The conclusion of a check."""

    HOLDS = "holds"
    FOUND = "found"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class Finding:
    """The request that shows a fault best, the expected answer, and the answer that came."""

    request: Request
    expected: str
    seen: str


class Trial:
    """The evidence of one check; parts are averaged, so that a fault in one of them is found."""

    def __init__(self, log_threshold: float) -> None:
        self._log_threshold = log_threshold
        self._parts: list[Evidence] = []
        self._planned: list[Evidence] = []
        self._best = 0.0
        self._worst = 0.0
        self.finding: Finding | None = None
        self.sentence = ""

    def draws(self, num_others: int = 0, *, is_planned: bool = True) -> DrawEvidence:
        """Return a new part for draws from distributions; one that is not planned for has no size of its own."""
        part = DrawEvidence(num_others)
        self._parts.append(part)
        if is_planned:
            self._planned.append(part)
        return part

    def least_of(self, num_readings: int) -> LeastEvidence:
        """Return a new part whose claim has several readings."""
        part = LeastEvidence(num_readings)
        self._parts.append(part)
        self._planned.append(part)
        return part

    def drop(self, part: Evidence) -> None:
        """Plan no longer for a part that cannot have draws."""
        self._planned.remove(part)

    def hits(self, rate: float = FAULT_RATE) -> HitEvidence:
        """Return a new part for outcomes that a server cannot have; the planned fault has them at `rate`."""
        part = HitEvidence(rate)
        self._parts.append(part)
        self._planned.append(part)
        return part

    def hit(self, part: HitEvidence, answer: Answer, expected: str, seen: str | None) -> None:
        """Count an answer; `seen` is the impossible outcome, None if it is as expected."""
        part.add(seen is not None)
        if seen is not None and (self.finding is None or part.num_hits == 1):
            self.finding = Finding(answer.request, expected, seen)

    def show(self, gained: float, answer: Answer, claim: Claim, seen: str) -> None:
        """Remember the answer with the most evidence."""
        if gained > self._worst:
            self._worst = gained
            expected = ", ".join(f"{token!r} {claim.probs[cell]:.1%}" for token, cell in list(claim.cells.items())[:8])
            self.finding = Finding(answer.request, expected, seen)

    @property
    def num_draws(self) -> int:
        return sum(part.num_draws for part in self._planned)

    @property
    def num_needed(self) -> int:
        """Draws that the stated power takes."""
        return sum(part.num_needed(self.part_threshold) for part in self._planned)

    @property
    def p_value(self) -> float:
        """The greatest evidence so far as a p-value."""
        return min(1.0, math.exp(-max(self._best, self.log_evidence)))

    @property
    def log_evidence(self) -> float:
        logs = np.asarray([part.log_evidence for part in self._parts] or [0.0])
        return float(logs.max() + math.log(np.exp(logs - logs.max()).mean()))

    @property
    def part_threshold(self) -> float:
        """The logarithm of the evidence that one part must have by itself."""
        return self._log_threshold + math.log(max(1, len(self._parts)))

    def is_found(self) -> bool:
        """True once the evidence suffices."""
        self._best = max(self._best, self.log_evidence)
        return self._best >= self._log_threshold

    def is_enough(self, part: Evidence | None = None) -> bool:
        """True if a fault is found, or would have been with the stated power, in one part or in each."""
        parts = self._planned if part is None else [part]
        return self.is_found() or all(each.is_enough(self.part_threshold) for each in parts)
