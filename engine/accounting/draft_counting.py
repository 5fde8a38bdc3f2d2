"""Counts the outcomes of drafts by method and by class of requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq

from engine.accounting.class_acceptance import ClassCounters, ClassKey, ClassStats, class_name
from engine.accounting.drift import DriftMonitor, DriftStats
from engine.accounting.engine_stats import DraftCounters, DraftStats
from engine.accounting.request_limits import is_adaptive
from engine.config import SpeculationConfig
from engine.sequence.checked_draft import CheckedDraft
from engine.sequence.request_tokens import RequestTokens
from engine.verifier.verify_result import VerifyResult
from engine.verifier.verify_task import VerifyTask
from protos.messages import SpeculationMethod

_OWN_METHODS = tuple(method for method in SpeculationMethod if method.can_branch)


class DraftCounting:
    """The draft counters of an engine, owned by the engine's thread."""

    def __init__(self, config: SpeculationConfig) -> None:
        own = (each for each in config.methods if each in _OWN_METHODS)
        self._own_method = next(own, SpeculationMethod.MODEL)
        # Adaptive suffix drafts are chosen by load, so a change of their acceptance is no drift.
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
        """Return the draft's source: matched text, or a model or head. Hybrids default to the deployment's own."""
        is_named = sequence.method not in (SpeculationMethod.HYBRID, SpeculationMethod.NONE)
        return str(draft.draft.source or (sequence.method if is_named else self._own_method))

    def check(self, draft: CheckedDraft) -> None:
        """Count a draft that was cut before its pass."""
        self._drafts.num_invalid_tokens += draft.is_cut

    def count(self, tasks: Seq[VerifyTask], drafts: Seq[CheckedDraft], verified: Seq[VerifyResult]) -> None:
        """Count the passes with drafts. Equal outcomes are grouped: hundreds of rows have few distinct ones."""
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
            # Tokens that the grammar forced are no evidence about the method that drafted before them.
            if (num_own := depth - num_forced) > 0:
                key = ClassKey(method, class_name(is_greedy=is_greedy, is_structured=has_grammar))
                self._classes.record(key, num_own, min(num_accepted, num_own), count)
                if method not in self._priced:
                    self._drift.record(f"{key.method}-{key.name}", num_accepted > 0, count)
        self._drift.end_step()
