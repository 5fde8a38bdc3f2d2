"""Reasoning-step speculation (SpecReason, arXiv:2504.07891): lossy, for requests that ask for it, where it is allowed.

The draft writes a whole step of reasoning; the target reads it in one pass and scores it. A step that scores at least
the threshold is committed as the draft wrote it; else the target writes that step itself, token by token and exactly,
with the drafts and the verifier that every other request has. After its own step the draft may try the next one.

    TARGET --its step ends--> DRAFT --step complete--> JUDGE --score >= threshold--> ACCEPTED --> DRAFT ...
      ^                         |                        |
      +---- the draft is away --+------- rejected -------+

The draft writes a few tokens per engine step, like for any pass, so others do not wait for a whole step of somebody's.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import replace
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
from engine.verifier import VerifyResult, VerifyTask
from engine.verifier.verifier import Verifier
from protos.errors import ConfigError
from protos.messages import VerifyMode

logger = logging.getLogger(__name__)


class StepSpeculation:
    """Stands before a proposer and a verifier, and passes on to them all that is not a reasoning step.

    `writer` is the draft that writes steps; it may be (a part of) `proposer`. Belongs to the engine's thread, which
    calls `write` once before it schedules.
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
        self._thoughts: dict[str, ReasoningSequence] = {}

    def open(self, sequence: Sequence) -> None:
        self._proposer.open(sequence)
        wish = sequence.request.speculation
        if wish.is_approximate:
            threshold = self._config.threshold if wish.threshold is None else wish.threshold
            thought = self._thoughts[sequence.request_id] = ReasoningSequence(sequence, threshold)
            thought.is_thinking = self._text.is_thinking(sequence.token_ids, len(sequence.token_ids), False)
            self._writer.open(thought.draft_sequence)

    def close(self, request_id: str) -> None:
        self._proposer.close(request_id)
        thought = self._thoughts.pop(request_id, None)
        if thought is not None:
            self._writer.close(thought.draft_sequence.request_id)

    def commit(self, sequences: Seq[Sequence]) -> None:
        """No drafts are asked for where the draft writes a step instead."""
        own = [each for each in sequences if self._phase(each) not in (Phase.DRAFT, Phase.ACCEPTED)]
        if own:
            self._proposer.commit(own)

    def write(self) -> bool:
        """Have the draft go on with every step it writes, and see which steps are complete.

        Sets `is_held` and `draft_allowance` of their sequences. True if anything is being written, so that a step
        that computes nothing is no reason to rest.
        """
        for thought in self._thoughts.values():
            self._advance(thought)
        writing = [thought for thought in self._thoughts.values() if thought.phase is Phase.DRAFT]
        if not writing:
            return False
        queries = [thought.query(self._num_wanted(thought)) for thought in writing]
        for thought, query, draft in zip(writing, queries, self._writer.propose(queries), strict=True):
            self._extend(thought, check_draft(draft, query, self._vocabulary).token_ids)
        self._writer.commit([thought.draft_sequence for thought in writing if thought.phase is Phase.DRAFT])
        return True

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        """The complete steps, each with the judge's question behind it; everybody else's drafts."""
        judged = [self._is_to_be_judged(query) for query in queries]
        asked = [query for query, is_judged in zip(queries, judged, strict=True) if not is_judged]
        drafts = iter(self._proposer.propose(asked) if asked else ())
        return [
            self._judged_draft(query.sequence.request_id) if is_judged else next(drafts)
            for query, is_judged in zip(queries, judged, strict=True)
        ]

    def verify(self, logits: Tensor, tasks: Seq[VerifyTask]) -> list[VerifyResult]:
        """Judge the steps, and verify everything else as ever.

        Of a rejected step what the target would have sampled itself stands in coupled verification: there any draft is
        as good as none.
        """
        accepted: dict[int, VerifyResult] = {}
        rejected: set[int] = set()
        exact: list[VerifyTask] = []
        for index, task in enumerate(tasks):
            thought = self._proposed(task.sequence)
            if thought is None:
                exact.append(task)
            elif self._is_accepted(thought, logits[task.first_row :]):
                accepted[index] = VerifyResult(tuple(thought.step_ids), len(thought.step_ids), is_exact=False)
            else:
                rejected.add(index)
                is_coupled = task.sequence.verify is VerifyMode.COUPLED
                exact.append(replace(task, draft=Draft(tuple(thought.step_ids)) if is_coupled else NO_DRAFT))
                self._leave_to_target(thought)
        verified = iter(self._verifier.verify(logits, exact) if exact else ())
        outcomes = (accepted[index] if index in accepted else next(verified) for index in range(len(tasks)))
        return [replace(each, is_exact=False) if index in rejected else each for index, each in enumerate(outcomes)]

    def _phase(self, sequence: Sequence) -> Phase:
        thought = self._thoughts.get(sequence.request_id)
        return Phase.TARGET if thought is None else thought.phase

    def _advance(self, thought: ReasoningSequence) -> None:
        """Take in what has been committed, and begin a step where it is the draft's turn."""
        if thought.is_stale:  # preempted, or without room for the step: the target has gone on by itself
            self._abandon(thought)
        if thought.phase is Phase.ACCEPTED:
            thought.phase = Phase.TARGET
            if thought.is_ending:
                self._leave_to_target(thought)
        if thought.phase is Phase.TARGET:
            self._look(thought)
            is_turn = thought.is_thinking and thought.is_at_boundary and thought.is_ready
            if is_turn and self._num_possible(thought) > 0:
                thought.hold()
                self._writer.commit((thought.draft_sequence,))

    def _look(self, thought: ReasoningSequence) -> None:
        """See whether the target's text is reasoning, and whether a step of it has ended."""
        token_ids = thought.sequence.token_ids
        num_read, num_new = max(0, thought.num_seen - thought.base_len), len(token_ids) - thought.num_seen
        if num_new == 0:
            return
        thought.num_seen = len(token_ids)
        thought.is_thinking = self._text.is_thinking(token_ids, num_new, thought.is_thinking)
        if not thought.is_thinking:
            thought.base_len, thought.is_at_boundary = len(token_ids), True
        elif not thought.is_at_boundary:
            is_long = len(token_ids) - thought.base_len >= self._config.max_step_tokens
            thought.is_at_boundary = is_long or self._text.cut(token_ids[thought.base_len :], num_read) is not None

    def _num_possible(self, thought: ReasoningSequence) -> int:
        """Tokens that the draft's next step may have: it leaves the target at least one to write."""
        if thought.stats.num_judged >= self._config.max_steps:
            return 0
        num_remaining = thought.sequence.num_remaining_tokens - 1 - len(self._judge.suffix_ids)
        return min(self._config.max_step_tokens, num_remaining)

    def _num_wanted(self, thought: ReasoningSequence) -> int:
        return min(thought.sequence.num_draft_tokens, self._num_possible(thought) - len(thought.step_ids))

    def _extend(self, thought: ReasoningSequence, token_ids: Seq[int]) -> None:
        """The draft has written these, or nothing: then the target does not wait for it."""
        if not token_ids:
            self._abandon(thought)
            return
        num_read = len(thought.step_ids)
        thought.draft_sequence.token_ids += token_ids
        step_ids = thought.step_ids
        cut = self._text.cut(step_ids, num_read, thought.sequence.stop_token_ids)
        if cut is None and len(step_ids) < self._num_possible(thought):
            return
        cut = cut or StepCut(len(step_ids))
        if cut.num_tokens == 0:
            self._leave_to_target(thought)
            return
        thought.submit(cut.num_tokens, len(self._judge.suffix_ids), is_ending=cut.is_ending)

    def _is_to_be_judged(self, query: DraftQuery) -> bool:
        """Marks the step as proposed where this pass has room for it."""
        thought = self._thoughts.get(query.sequence.request_id)
        if thought is None or thought.phase is not Phase.JUDGE or thought.is_stale:
            return False
        thought.is_proposed = query.max_draft_tokens >= len(thought.step_ids) + len(self._judge.suffix_ids)
        return thought.is_proposed

    def _judged_draft(self, request_id: str) -> Draft:
        return Draft((*self._thoughts[request_id].step_ids, *self._judge.suffix_ids))

    def _proposed(self, sequence: Sequence) -> ReasoningSequence | None:
        """The thought whose step was proposed in this pass, once."""
        thought = self._thoughts.get(sequence.request_id)
        if thought is None or not thought.is_proposed:
            return None
        thought.is_proposed = False
        return thought

    def _is_accepted(self, thought: ReasoningSequence, logits: Tensor) -> bool:
        """The verdict, counted; `logits [S + suffix + 1, V]` and more rows follow the committed tokens."""
        step_ids = thought.step_ids
        score = self._judge.score(logits, step_ids)
        is_accepted = score >= thought.threshold
        self.stats += ReasoningStats.of_verdict(len(step_ids), score, is_accepted=is_accepted)
        thought.record(is_accepted=is_accepted)
        if is_accepted:
            thought.phase = Phase.ACCEPTED
        request_id = thought.sequence.request_id
        logger.debug(
            "request %s: step of %d tokens scores %.2f of %.2f", request_id, len(step_ids), score, thought.threshold
        )
        return is_accepted

    def _abandon(self, thought: ReasoningSequence) -> None:
        """The step will not be judged."""
        self.stats += ReasoningStats(num_abandoned=1)
        self._leave_to_target(thought)

    def _leave_to_target(self, thought: ReasoningSequence) -> None:
        """The target writes the next step; the draft starts over from what is committed now."""
        self._writer.close(thought.draft_sequence.request_id)
        thought.release()
        self._writer.open(thought.new_draft_sequence())


def step_speculation(
    config: StepConfig,
    tokenizer_file: Path | None,
    vocab_size: int,
    proposer: Proposer,
    writer: Proposer,
    verifier: Verifier,
) -> StepSpeculation:
    """Step speculation over the target's own tokenizer.

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
