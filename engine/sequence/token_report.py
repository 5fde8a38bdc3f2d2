"""Reports the source of a sequence's tokens, and why passes had no drafts, for requests that ask."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from protos.messages import PlainReason, SpeculationExplanation


class TokenReport:
    """Counts the passes of one sequence. `sources` has one entry per token of the last pass, before any cut."""

    def __init__(self) -> None:
        self.sources: tuple[str, ...] = ()
        self._drafted: Counter[str] = Counter()
        self._plain: Counter[PlainReason] = Counter()

    def record(self, sources: Seq[str], method: str, reason: PlainReason | None) -> None:
        """Count one pass: with drafts of `method`, or without drafts for `reason`."""
        self.sources = tuple(sources)
        if reason is None:
            self._drafted[method] += 1
        else:
            self._plain[reason] += 1

    def explanation(self) -> SpeculationExplanation:
        """Return the counts so far."""
        return SpeculationExplanation(dict(self._drafted), {str(reason): num for reason, num in self._plain.items()})
