"""Reasoning-step speculation (SpecReason, arXiv:2504.07891): lossy, for requests that ask for it, where it is allowed.

The draft writes a whole step of reasoning; the target reads it in one pass and scores it. A step that scores at least
the threshold is committed as the draft wrote it; else the target writes that step itself, token by token and exactly,
with the drafts and the verifier that every other request has. After its own step the draft may try the next one.

    TARGET --its step ends--> DRAFT --step complete--> JUDGE --score >= threshold--> ACCEPTED --> DRAFT ...
      ^                         |                        |
      +---- the draft is away --+------- rejected -------+

The draft writes a few tokens per engine step, like for any pass, so that no request waits for a whole step of another.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence as Seq
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

from engine.approximate.judge import StepJudge, judge_of
from engine.approximate.reasoning_sequence import Phase, ReasoningSequence
from engine.approximate.step_text import StepCut, StepText
from engine.config import StepConfig
from engine.draft import NO_DRAFT, Draft
from engine.proposer import Proposer
from engine.proposer.checked_draft import check_draft
from engine.sampling.vocabulary import Vocabulary
from engine.sequence.draft_query import DraftQuery
from engine.sequence.sequence import Sequence
from engine.stats.engine_stats import ReasoningStats
from engine.verifier.verifier import Verifier
from engine.verifier.verify_result import VerifyResult
from engine.verifier.verify_task import VerifyTask
from protos.errors import ConfigError
from protos.messages import VerifyMode

logger = logging.getLogger(__name__)


class StepSpeculation:
    """Stands before a proposer and a verifier, and passes on to them all that is not a reasoning step.

    It belongs to the engine's thread, which calls `write` once before it schedules.

    Args:
        config: Threshold, lengths and number of the steps.
        text: Finds the boundaries of steps.
        judge: Scores a step.
        proposer: Drafts of everything else.
        writer: The draft that writes steps; it may be (a part of) `proposer`.
        verifier: Verifies everything else.
        vocabulary: The target's token ids.
    """

    def __init__(
        self,
        config: StepConfig,
        text: StepText,
        judge: StepJudge,
        *,
        proposer: Proposer,
        writer: Proposer,
        verifier: Verifier,
        vocabulary: Vocabulary,
    ) -> None:
        self.stats = ReasoningStats()
        self._config = config
        self._text = text
        self._judge = judge
        self._proposer = proposer
        self._writer = writer
        self._verifier = verifier
        self._vocabulary = vocabulary
        self._reasoning: dict[str, ReasoningSequence] = {}

    def open(self, sequence: Sequence) -> None:
        self._proposer.open(sequence)
        asked = sequence.request.speculation
        if asked.is_approximate:
            threshold = self._config.threshold if asked.threshold is None else asked.threshold
            reasoning = self._reasoning[sequence.request_id] = ReasoningSequence(sequence, threshold)
            reasoning.is_thinking = self._text.is_thinking(sequence.token_ids, len(sequence.token_ids), False)
            self._writer.open(reasoning.draft_sequence)

    def close(self, request_id: str) -> None:
        self._proposer.close(request_id)
        reasoning = self._reasoning.pop(request_id, None)
        if reasoning is not None:
            self._writer.close(reasoning.draft_sequence.request_id)

    def commit(self, sequences: Seq[Sequence]) -> None:
        """Ask for drafts, but not where the draft writes a step instead."""
        exact = [each for each in sequences if self._phase(each) not in (Phase.DRAFT, Phase.ACCEPTED)]
        if exact:
            self._proposer.commit(exact)

    def write(self) -> bool:
        """Let the draft go on with every step it writes, and submit the complete ones.

        Sets `is_held` and `draft_allowance` of their sequences. True if anything is being written, so that a step
        that computes nothing is no reason to rest.
        """
        for reasoning in self._reasoning.values():
            self._advance(reasoning)
        writing = [reasoning for reasoning in self._reasoning.values() if reasoning.phase is Phase.DRAFT]
        if not writing:
            return False
        queries = [reasoning.query(self._num_wanted(reasoning)) for reasoning in writing]
        for reasoning, query, draft in zip(writing, queries, self._writer.propose(queries), strict=True):
            self._extend(reasoning, check_draft(draft, query, self._vocabulary).token_ids)
        self._writer.commit([reasoning.draft_sequence for reasoning in writing if reasoning.phase is Phase.DRAFT])
        return True

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        """Return the complete steps, each with the judge's question behind it, and all other drafts."""
        judged = [self._is_to_be_judged(query) for query in queries]
        asked = [query for query, is_judged in zip(queries, judged, strict=True) if not is_judged]
        drafts = iter(self._proposer.propose(asked) if asked else ())
        return [
            self._judged_draft(query.sequence.request_id) if is_judged else next(drafts)
            for query, is_judged in zip(queries, judged, strict=True)
        ]

    def verify(self, logits: Tensor, tasks: Seq[VerifyTask]) -> list[VerifyResult]:
        """Judge the steps, and verify everything else exactly.

        Coupled verification keeps the tokens of a rejected step that the target would have sampled itself: there any
        draft is as good as none.
        """
        accepted: dict[int, VerifyResult] = {}
        rejected: set[int] = set()
        exact: list[VerifyTask] = []
        for index, task in enumerate(tasks):
            reasoning = self._proposed(task.sequence)
            if reasoning is None:
                exact.append(task)
            elif self._is_accepted(reasoning, logits[task.first_row :]):
                accepted[index] = VerifyResult(tuple(reasoning.step_ids), len(reasoning.step_ids), is_exact=False)
            else:
                rejected.add(index)
                is_coupled = task.sequence.verify is VerifyMode.COUPLED
                exact.append(task._replace(draft=Draft(tuple(reasoning.step_ids)) if is_coupled else NO_DRAFT))
                self._leave_to_target(reasoning)
        verified = iter(self._verifier.verify(logits, exact) if exact else ())
        outcomes = (accepted[index] if index in accepted else next(verified) for index in range(len(tasks)))
        return [each._replace(is_exact=False) if index in rejected else each for index, each in enumerate(outcomes)]

    def _phase(self, sequence: Sequence) -> Phase:
        reasoning = self._reasoning.get(sequence.request_id)
        return Phase.TARGET if reasoning is None else reasoning.phase

    def _advance(self, reasoning: ReasoningSequence) -> None:
        """Take in the committed tokens, and begin a step where it is the draft's turn."""
        if reasoning.is_stale:  # preempted, or without room for the step: the target has gone on by itself
            self._abandon(reasoning)
        if reasoning.phase is Phase.ACCEPTED:
            reasoning.phase = Phase.TARGET
            if reasoning.is_ending:
                self._leave_to_target(reasoning)
        if reasoning.phase is Phase.TARGET:
            self._look(reasoning)
            is_turn = reasoning.is_thinking and reasoning.is_at_boundary and reasoning.is_ready
            if is_turn and self._num_possible(reasoning) > 0:
                reasoning.hold()
                self._writer.commit((reasoning.draft_sequence,))

    def _look(self, reasoning: ReasoningSequence) -> None:
        """Find out if the target's text is reasoning, and if a step of it has ended."""
        token_ids = reasoning.sequence.token_ids
        num_read, num_new = max(0, reasoning.num_seen - reasoning.base_len), len(token_ids) - reasoning.num_seen
        if num_new == 0:
            return
        reasoning.num_seen = len(token_ids)
        reasoning.is_thinking = self._text.is_thinking(token_ids, num_new, reasoning.is_thinking)
        if not reasoning.is_thinking:
            reasoning.base_len, reasoning.is_at_boundary = len(token_ids), True
        elif not reasoning.is_at_boundary:
            is_long = len(token_ids) - reasoning.base_len >= self._config.max_step_tokens
            reasoning.is_at_boundary = is_long or self._text.cut(token_ids[reasoning.base_len :], num_read) is not None

    def _num_possible(self, reasoning: ReasoningSequence) -> int:
        """Return how many tokens the draft's next step may have: it leaves the target at least one to write."""
        if reasoning.stats.num_judged >= self._config.max_steps:
            return 0
        num_remaining = reasoning.sequence.num_remaining_tokens - 1 - len(self._judge.suffix_ids)
        return min(self._config.max_step_tokens, num_remaining)

    def _num_wanted(self, reasoning: ReasoningSequence) -> int:
        return min(reasoning.sequence.num_draft_tokens, self._num_possible(reasoning) - len(reasoning.step_ids))

    def _extend(self, reasoning: ReasoningSequence, token_ids: Seq[int]) -> None:
        """Add what the draft has written to its step; where that is nothing, the target goes on without it."""
        if not token_ids:
            self._abandon(reasoning)
            return
        num_read = len(reasoning.step_ids)
        reasoning.draft_sequence.token_ids += token_ids
        step_ids = reasoning.step_ids
        cut = self._text.cut(step_ids, num_read, reasoning.sequence.stop_token_ids)
        if cut is None and len(step_ids) < self._num_possible(reasoning):
            return
        cut = cut or StepCut(len(step_ids))
        if cut.num_tokens == 0:
            self._leave_to_target(reasoning)
            return
        reasoning.submit(cut.num_tokens, len(self._judge.suffix_ids), is_ending=cut.is_ending)

    def _is_to_be_judged(self, query: DraftQuery) -> bool:
        """True if this pass has room for the step, which it then marks as proposed."""
        reasoning = self._reasoning.get(query.sequence.request_id)
        if reasoning is None or reasoning.phase is not Phase.JUDGE or reasoning.is_stale:
            return False
        reasoning.is_proposed = query.max_draft_tokens >= len(reasoning.step_ids) + len(self._judge.suffix_ids)
        return reasoning.is_proposed

    def _judged_draft(self, request_id: str) -> Draft:
        return Draft((*self._reasoning[request_id].step_ids, *self._judge.suffix_ids))

    def _proposed(self, sequence: Sequence) -> ReasoningSequence | None:
        """Return the reasoning whose step was proposed in this pass, and clear the mark."""
        reasoning = self._reasoning.get(sequence.request_id)
        if reasoning is None or not reasoning.is_proposed:
            return None
        reasoning.is_proposed = False
        return reasoning

    def _is_accepted(self, reasoning: ReasoningSequence, logits: Tensor) -> bool:
        """Judge a step and count the verdict; `logits [S + suffix + 1, V]` follow the committed tokens."""
        step_ids = reasoning.step_ids
        score = self._judge.score(logits, step_ids)
        if math.isnan(score):  # the target has overflowed on the step
            score = 0.0
        is_accepted = score >= reasoning.threshold
        self.stats += ReasoningStats.of_verdict(len(step_ids), score, is_accepted=is_accepted)
        reasoning.record(is_accepted=is_accepted)
        if is_accepted:
            reasoning.phase = Phase.ACCEPTED
        request_id = reasoning.sequence.request_id
        logger.debug(
            "request %s: step of %d tokens scores %.2f of %.2f", request_id, len(step_ids), score, reasoning.threshold
        )
        return is_accepted

    def _abandon(self, reasoning: ReasoningSequence) -> None:
        """Give up a step that will not be judged."""
        self.stats += ReasoningStats(num_abandoned=1)
        self._leave_to_target(reasoning)

    def _leave_to_target(self, reasoning: ReasoningSequence) -> None:
        """Let the target write the next step; the draft starts over from the committed tokens."""
        self._writer.close(reasoning.draft_sequence.request_id)
        reasoning.release()
        self._writer.open(reasoning.new_draft_sequence())


def step_speculation(
    config: StepConfig,
    tokenizer_file: Path | None,
    vocab_size: int,
    proposer: Proposer,
    writer: Proposer,
    verifier: Verifier,
) -> StepSpeculation:
    """Return step speculation over the target's own tokenizer.

    Raises:
        ConfigError: the model has no tokenizer.json, or none that the judge can use.
    """
    if tokenizer_file is None:
        raise ConfigError("speculation.steps needs the target's tokenizer.json, and there is none; remove the steps")
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    return StepSpeculation(
        config,
        StepText(tokenizer, config),
        judge_of(config, tokenizer),
        proposer=proposer,
        writer=writer,
        verifier=verifier,
        vocabulary=Vocabulary(vocab_size),
    )
