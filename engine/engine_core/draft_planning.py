"""The lengths and methods of an engine's drafts, which earlier passes decide where the configuration is adaptive."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.config import SpeculationConfig
from engine.proposer.adaptive.draft_budget import DraftBudget, DraftedPass, PassTime
from engine.proposer.adaptive.method_chooser import MethodChooser
from engine.proposer.adaptive.request_limits import draft_rule, is_adaptive
from engine.scheduler.in_flight_batch import InFlightBatch
from engine.sequence.request_tokens import DraftRule
from engine.sequence.sequence import Sequence, SequenceStatus
from engine.stats.step_times import StepTimer
from engine.verifier.verify_result import VerifyResult
from protos.messages import GenerateRequest


class DraftPlanning:
    """The rules of a deployment's drafts and the budget behind them; state of the engine's thread.

    Attributes:
        budget: what plans each pass; None where K is fixed.
    """

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self._chooser = MethodChooser(config.choices, self._goodput)
        self.budget = _draft_budget(config) if is_adaptive(config) else None

    @property
    def speedups(self) -> dict[str, float]:
        """Measured tokens per second against no speculation, by class of requests."""
        return {} if self.budget is None else self.budget.speedups

    def rule(self, request: GenerateRequest) -> DraftRule:
        """Return the drafts that a new request may have."""
        return draft_rule(request, self._config, self._chooser)

    def is_open(self, sequence: Sequence) -> bool:
        """False while drafts are switched off for the class of such requests."""
        return self.budget is None or self.budget.is_open(sequence)

    def forget_draft(self) -> None:
        """Begin anew to learn what drafts are worth: from now on another model makes them."""
        if self.budget is not None:
            self.budget.forget_draft()

    def plan_next(
        self, issued: InFlightBatch, verified: Seq[VerifyResult], timer: StepTimer, *, is_underway: bool
    ) -> None:
        """Let the budget learn from a committed pass and set the next one's lengths, before anything is drafted for it.

        Args:
            issued: the pass.
            verified: its outcomes, of each sampled sequence.
            timer: the step's, up to the commit.
            is_underway: True where the next pass has been issued without drafts.
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
        # A plan made while this pass was on its way is unused, unless another pass follows it.
        if not issued.is_ahead or is_underway:
            sequences = [scheduled.sequence for scheduled in sampled]
            self.budget.plan([each for each in sequences if each.status is SequenceStatus.RUNNING])

    def _goodput(self, method: str, kind: str) -> float | None:
        return None if self.budget is None else self.budget.goodput(method, kind)


def _draft_budget(config: SpeculationConfig) -> DraftBudget:
    max_pass_s = float("inf") if config.target_itl_s is None else config.target_itl_s
    return DraftBudget(config.num_tokens, config.max_num_tokens, max_pass_s)
