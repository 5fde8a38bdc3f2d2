"""Reasoning-step speculation (SpecReason, arXiv:2504.07891): lossy, for requests that ask, if the deployment allows it.

The draft writes a whole reasoning step, and the target scores it in one pass. If the score reaches the threshold, the
step is committed as the draft wrote it. Otherwise the target writes the step itself, exactly, with the drafts and the
verifier of every other request. Then the draft may write the next step.

    TARGET --its step ends--> DRAFT --step complete--> SCORE --score >= threshold--> ACCEPTED --> DRAFT ...
      ^                         |                        |
      +-- the draft is absent --+------- rejected -------+

The draft writes a few tokens per engine step, so no request waits for another's whole reasoning step.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence as Seq
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor

from engine.accounting.engine_stats import ReasoningStats
from engine.approximate.reasoning_sequence import Phase, ReasoningSequence, StepText, make_scorer
from engine.batch.draft import NO_DRAFT, Draft
from engine.config import StepConfig
from engine.proposer import Proposer
from engine.sequence.batch import DraftQuery, check_draft
from engine.sequence.sequence import Sequence
from engine.verifier.verifier import Verifier
from engine.verifier.verify_task import VerifyResult, VerifyTask
from protos.errors import ConfigError
from protos.messages import VerifyMode

logger = logging.getLogger(__name__)


class StepSpeculation:
    """Wraps a proposer and a verifier; handles reasoning steps and passes on everything else.

    Used by the engine's thread alone, which calls `write` once before it schedules.

    Args:
        config: Threshold, lengths and number of steps.
        tokenizer_file: The target's tokenizer.json; None if it has none.
        vocab_size: The number of the target's token ids.
        proposer: Drafts for everything else.
        writer: The draft that writes steps; may be `proposer` or a part of it.
        verifier: Verifies everything else.

    Raises:
        ConfigError: the model has no tokenizer.json, or the scorer cannot use it.
    """

    def __init__(
        self,
        config: StepConfig,
        tokenizer_file: Path | None,
        vocab_size: int,
        *,
        proposer: Proposer,
        writer: Proposer,
        verifier: Verifier,
    ) -> None:
        if tokenizer_file is None:
            raise ConfigError(
                "speculation.steps needs the target's tokenizer.json, which does not exist; remove the steps"
            )
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.stats = ReasoningStats()
        self._config = config
        self._text = StepText(tokenizer, config)
        self._scorer = make_scorer(config, tokenizer)
        self._proposer = proposer
        self._writer = writer
        self._verifier = verifier
        self._vocab_size = vocab_size
        self._reasoning: dict[str, ReasoningSequence] = {}

    def open(self, sequence: Sequence) -> None:
        self._proposer.open(sequence)
        params = sequence.request.speculation
        if params.is_approximate:
            threshold = self._config.threshold if params.threshold is None else params.threshold
            reasoning = self._reasoning[sequence.request_id] = ReasoningSequence(sequence, threshold)
            reasoning.is_thinking = self._text.is_thinking(sequence.token_ids, len(sequence.token_ids), False)
            self._writer.open(reasoning.draft_sequence)

    def close(self, request_id: str) -> None:
        self._proposer.close(request_id)
        reasoning = self._reasoning.pop(request_id, None)
        if reasoning is not None:
            self._writer.close(reasoning.draft_sequence.request_id)

    def commit(self, sequences: Seq[Sequence]) -> None:
        """Commit the sequences whose next pass needs an exact draft."""
        exact = [each for each in sequences if self._phase(each) not in (Phase.DRAFT, Phase.ACCEPTED)]
        if exact:
            self._proposer.commit(exact)

    def write(self) -> bool:
        """Draft more of every open step, and submit the complete ones.

        Sets `is_held` and `draft_allowance` of their sequences. Returns True if a step is being written: the engine
        must not go idle then, even if its own step computes nothing.
        """
        for reasoning in self._reasoning.values():
            self._advance(reasoning)
        writing = [reasoning for reasoning in self._reasoning.values() if reasoning.phase is Phase.DRAFT]
        if not writing:
            return False
        queries = [reasoning.query(self._num_wanted(reasoning)) for reasoning in writing]
        for reasoning, query, draft in zip(writing, queries, self._writer.propose(queries), strict=True):
            self._extend(reasoning, check_draft(draft, query, self._vocab_size).token_ids)
        self._writer.commit([reasoning.draft_sequence for reasoning in writing if reasoning.phase is Phase.DRAFT])
        return True

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        """Return the submitted steps, each followed by the scorer's suffix, and all other drafts."""
        submitted = [self._is_submitted(query) for query in queries]
        exact = [query for query, is_step in zip(queries, submitted, strict=True) if not is_step]
        drafts = iter(self._proposer.propose(exact) if exact else ())
        return [
            self._submitted_draft(query.sequence.request_id) if is_step else next(drafts)
            for query, is_step in zip(queries, submitted, strict=True)
        ]

    def verify(self, logits: Tensor, tasks: Seq[VerifyTask]) -> list[VerifyResult]:
        """Score the steps, and verify everything else exactly.

        A rejected step serves as an ordinary draft in coupled verification, which accepts the tokens that the target
        would have sampled itself.
        """
        accepted: dict[int, VerifyResult] = {}
        rejected: set[int] = set()
        exact: list[VerifyTask] = []
        # Accept or reject each step; a rejected one leaves a task for the exact verifier.
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
        # Merge both kinds of results in the order of the tasks.
        verified = iter(self._verifier.verify(logits, exact) if exact else ())
        outcomes = (accepted[index] if index in accepted else next(verified) for index in range(len(tasks)))
        return [each._replace(is_exact=False) if index in rejected else each for index, each in enumerate(outcomes)]

    def _phase(self, sequence: Sequence) -> Phase:
        reasoning = self._reasoning.get(sequence.request_id)
        return Phase.TARGET if reasoning is None else reasoning.phase

    def _advance(self, reasoning: ReasoningSequence) -> None:
        """Look at the committed tokens, and begin a step if it is the draft's turn."""
        if reasoning.is_stale:  # after a preemption, or a pass without room for the step, the target has written on
            self._abandon(reasoning)
        if reasoning.phase is Phase.ACCEPTED:
            reasoning.phase = Phase.TARGET
            if reasoning.is_ending:
                self._leave_to_target(reasoning)
        if reasoning.phase is Phase.TARGET:
            self._find_boundary(reasoning)
            is_turn = reasoning.is_thinking and reasoning.is_at_boundary and reasoning.is_ready
            if is_turn and self._num_possible(reasoning) > 0:
                reasoning.hold()
                self._writer.commit((reasoning.draft_sequence,))

    def _find_boundary(self, reasoning: ReasoningSequence) -> None:
        """Update `is_thinking` and `is_at_boundary` from the new committed tokens."""
        token_ids = reasoning.sequence.token_ids
        num_searched, num_new = max(0, reasoning.num_seen - reasoning.base_len), len(token_ids) - reasoning.num_seen
        if num_new == 0:
            return
        reasoning.num_seen = len(token_ids)
        reasoning.is_thinking = self._text.is_thinking(token_ids, num_new, reasoning.is_thinking)
        if not reasoning.is_thinking:
            reasoning.base_len, reasoning.is_at_boundary = len(token_ids), True
        elif not reasoning.is_at_boundary:
            step_ids = token_ids[reasoning.base_len :]
            is_long = len(step_ids) >= self._config.max_step_tokens
            reasoning.is_at_boundary = is_long or self._text.find_end(step_ids, num_searched) is not None

    def _num_possible(self, reasoning: ReasoningSequence) -> int:
        """Return the most tokens of the draft's next step; the target keeps at least one token to write."""
        if reasoning.stats.num_scored >= self._config.max_steps:
            return 0
        num_remaining = reasoning.sequence.num_remaining_tokens - 1 - len(self._scorer.suffix_ids)
        return min(self._config.max_step_tokens, num_remaining)

    def _num_wanted(self, reasoning: ReasoningSequence) -> int:
        return min(reasoning.sequence.num_draft_tokens, self._num_possible(reasoning) - len(reasoning.step_ids))

    def _extend(self, reasoning: ReasoningSequence, token_ids: Seq[int]) -> None:
        """Append the draft's tokens to its step; without any, the target writes the step."""
        if not token_ids:
            self._abandon(reasoning)
            return
        num_searched = len(reasoning.step_ids)
        reasoning.draft_sequence.token_ids += token_ids
        step_ids = reasoning.step_ids
        end = self._text.find_end(step_ids, num_searched, reasoning.sequence.stop_token_ids)
        if end is None and len(step_ids) < self._num_possible(reasoning):
            return
        num_tokens, is_ending = end or (len(step_ids), False)
        if num_tokens == 0:
            self._leave_to_target(reasoning)
            return
        reasoning.submit(num_tokens, len(self._scorer.suffix_ids), is_ending=is_ending)

    def _is_submitted(self, query: DraftQuery) -> bool:
        """True if this query has a submitted step and room for it; the step is then marked as proposed."""
        reasoning = self._reasoning.get(query.sequence.request_id)
        if reasoning is None or reasoning.phase is not Phase.SCORE or reasoning.is_stale:
            return False
        reasoning.is_proposed = query.max_draft_tokens >= len(reasoning.step_ids) + len(self._scorer.suffix_ids)
        return reasoning.is_proposed

    def _submitted_draft(self, request_id: str) -> Draft:
        return Draft((*self._reasoning[request_id].step_ids, *self._scorer.suffix_ids))

    def _proposed(self, sequence: Sequence) -> ReasoningSequence | None:
        """Return the reasoning of a step that this pass has proposed, and clear its mark."""
        reasoning = self._reasoning.get(sequence.request_id)
        if reasoning is None or not reasoning.is_proposed:
            return None
        reasoning.is_proposed = False
        return reasoning

    def _is_accepted(self, reasoning: ReasoningSequence, logits: Tensor) -> bool:
        """Score a step and count the result; `logits [S + suffix + 1, V]` follow the committed tokens."""
        step_ids = reasoning.step_ids
        score = self._scorer.score(logits, step_ids)
        if math.isnan(score):  # the target's logits overflowed
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
        """Drop a step without a score."""
        self.stats += ReasoningStats(num_abandoned=1)
        self._leave_to_target(reasoning)

    def _leave_to_target(self, reasoning: ReasoningSequence) -> None:
        """Let the target write the next step, and give the draft a new sequence of the committed tokens."""
        self._writer.close(reasoning.draft_sequence.request_id)
        reasoning.release()
        self._writer.open(reasoning.new_draft_sequence())
