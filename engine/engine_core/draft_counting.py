"""Outcomes of drafts, counted by the method that drafted and by the class of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from engine.config import SpeculationConfig
from engine.proposer.adaptive.request_limits import is_adaptive
from engine.proposer.checked_draft import CheckedDraft
from engine.sequence.request_tokens import RequestTokens
from engine.stats.class_acceptance import ClassCounters, ClassKey, ClassStats, class_name
from engine.stats.drift import DriftMonitor, DriftStats
from engine.stats.engine_stats import DraftCounters, DraftStats
from engine.verifier.verify_result import VerifyResult
from engine.verifier.verify_task import VerifyTask
from protos.messages import SpeculationMethod

_OWN_METHODS = tuple(method for method in SpeculationMethod if method.can_branch)


class DraftCounting:
    """The sums of an engine's drafts; state of the engine's thread."""

    def __init__(self, config: SpeculationConfig) -> None:
        own = (each for each in config.methods if each in _OWN_METHODS)
        self._own_method = next(own, SpeculationMethod.MODEL)
        # Where a draft must be worth its row, which of them are made follows the load, and so does their acceptance.
        self._priced = (SpeculationMethod.SUFFIX,) if is_adaptive(config) else ()
        self._drafts = DraftCounters()
        self._classes = ClassCounters()
        self._drift = DriftMonitor()

    @property
    def drafts(self) -> DraftStats:
        return self._drafts.snapshot()

    @property
    def classes(self) -> tuple[ClassStats, ...]:
        return self._classes.snapshot()

    @property
    def drift(self) -> tuple[DriftStats, ...]:
        return self._drift.snapshot()

    def method_of(self, draft: CheckedDraft, sequence: RequestTokens) -> str:
        """Return the text that was matched, or the model or head that drafted: for hybrids the deployment's own."""
        is_named = sequence.method not in (SpeculationMethod.HYBRID, SpeculationMethod.NONE)
        return str(draft.draft.source or (sequence.method if is_named else self._own_method))

    def check(self, draft: CheckedDraft) -> None:
        """Count what was cut off a draft before its pass."""
        self._drafts.num_invalid_tokens += draft.is_cut

    def count(self, tasks: Seq[VerifyTask], drafts: Seq[CheckedDraft], verified: Seq[VerifyResult]) -> None:
        """Count the passes with drafts, equal ones at once: hundreds of one step have few values between them."""
        passes = Counter(
            [
                (
                    self.method_of(draft, task.sequence),
                    task.sequence.is_greedy,
                    task.sequence.matcher is not None,
                    draft.num_valid,
                    draft.depth,
                    draft.num_forced,
                    outcome.num_accepted,
                )
                for task, draft, outcome in zip(tasks, drafts, verified, strict=True)
                if outcome.is_exact and draft.num_valid > 0
            ]
        )
        for (method, is_greedy, has_grammar, num_valid, depth, num_forced, num_accepted), count in passes.items():
            self._drafts.record(num_valid, num_accepted, depth, count)
            # What the grammar forced says nothing of the method that drafted before it.
            if (num_own := depth - num_forced) > 0:
                key = ClassKey(method, class_name(is_greedy=is_greedy, is_structured=has_grammar))
                self._classes.record(key, num_own, min(num_accepted, num_own), count)
                if method not in self._priced:
                    self._drift.record(f"{key.method}-{key.name}", num_accepted > 0, count)
        self._drift.end_step()
