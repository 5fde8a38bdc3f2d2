"""Plans the lengths and methods of an engine's drafts; an adaptive configuration learns them from earlier passes."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.accounting.draft_budget import DraftBudget, DraftedPass, PassTime
from engine.accounting.method_chooser import MethodChooser
from engine.accounting.request_limits import draft_rule, is_adaptive
from engine.accounting.step_times import StepTimer
from engine.config import SpeculationConfig
from engine.scheduler.in_flight_batch import InFlightBatch
from engine.sequence.request_tokens import DraftRule
from engine.sequence.sequence import Sequence, SequenceStatus
from engine.verifier.verify_result import VerifyResult
from protos.messages import GenerateRequest


class DraftPlanning:
    """The draft rules of a deployment and their budget, owned by the engine's thread.

    Attributes:
        budget: plans each pass; None if K is fixed.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._chooser = MethodChooser(config.choices, self._goodput)
        self.budget = _draft_budget(config) if is_adaptive(config) else None

    @property
    def speedups(self) -> dict[str, float]:
        """Measured speedup over no speculation, by class of requests."""
        return {} if self.budget is None else self.budget.speedups

    def rule(self, request: GenerateRequest) -> DraftRule:
        """Return the draft rule of a new request."""
        return draft_rule(request, self._config, self._chooser)

    def is_open(self, sequence: Sequence) -> bool:
        """False while the budget has switched drafts off for the sequence's class."""
        return self.budget is None or self.budget.is_open(sequence)

    def forget_draft(self) -> None:
        """Discard the measurements of drafts, since another model makes them now."""
        if self.budget is not None:
            self.budget.forget_draft()

    def plan_next(
        self, issued: InFlightBatch, verified: Seq[VerifyResult], timer: StepTimer, *, is_underway: bool
    ) -> None:
        """Update the budget with a committed pass, then set the draft lengths of the next one.

        Args:
            issued: the committed pass.
            verified: the outcome of each sampled sequence.
            timer: the step's timer, up to the commit.
            is_underway: True if the next pass has already been issued, without drafts.
        """
        if self.budget is None:
            return
        sampled = issued.batch.sampled
        passes = [
            DraftedPass(each.sequence, each.max_draft_tokens, len(draft.draft.token_ids), outcome.num_accepted)
            for each, draft, outcome in zip(sampled, issued.drafts, verified, strict=True)
            if outcome.is_exact
        ]
        times = timer.times()
        is_comparable = len(passes) == len(sampled)
        time = PassTime(times.draft_s, times.total_s - times.draft_s) if is_comparable else None
        num_prompt_rows = sum(scheduled.num_tokens for scheduled in issued.batch.scheduled) - len(sampled)
        self.budget.observe(passes, time, num_prompt_rows)
        # After a pass issued ahead, the earlier plan is still unused, unless yet another pass is underway.
        if not issued.is_ahead or is_underway:
            sequences = [scheduled.sequence for scheduled in sampled]
            self.budget.plan([each for each in sequences if each.status is SequenceStatus.RUNNING])

    def _goodput(self, method: str, kind: str) -> float | None:
        return None if self.budget is None else self.budget.goodput(method, kind)


def _draft_budget(config: SpeculationConfig) -> DraftBudget:
    max_pass_s = float("inf") if config.target_itl_s is None else config.target_itl_s
    return DraftBudget(config.num_tokens, config.max_num_tokens, max_pass_s)
