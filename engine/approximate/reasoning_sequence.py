"""One sequence whose reasoning steps the draft may write, and the draft's copy of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from enum import Enum, auto

from engine.sequence.draft_query import UnscheduledQuery
from engine.sequence.request_tokens import DraftRule, RequestTokens
from engine.sequence.sequence import Sequence, SequenceStatus
from protos.messages import SpeculationMethod, SpeculationParams, StepStats


class Phase(Enum):
    """The author of the next tokens. Every step begins and ends with TARGET or ACCEPTED.

    TARGET: the target writes, with verified drafts, to the end of its step. DRAFT: the draft writes, and the sequence
    computes nothing. JUDGE: a step is complete, and the next pass reads it. ACCEPTED: that pass has committed it.
    """

    TARGET = auto()
    DRAFT = auto()
    JUDGE = auto()
    ACCEPTED = auto()


class ReasoningSequence:
    """A sequence and the step of reasoning that the draft writes for it.

    `sequence` is the target's. `draft_sequence` is the draft's copy: the committed tokens, and a step that it writes. A
    draft cannot take tokens back: after a step that was not accepted it gets a new copy, under a new id. `base_len` is
    where the current step begins; the first `num_seen` committed tokens have been searched for its end, and
    `is_at_boundary` is set where it has come.
    """

    def __init__(self, sequence: Sequence, threshold: float) -> None:
        self.sequence = sequence
        self.threshold = threshold
        self.phase = Phase.TARGET
        self.base_len = self.num_seen = len(sequence.token_ids)
        self.is_thinking = False
        self.is_at_boundary = True
        self.is_ending = False  # behind the step that is judged the draft would end the reasoning
        self.is_proposed = False  # the step is in the pass that is being computed
        self._num_draft_sequences = 0
        self.draft_sequence = self.new_draft_sequence()

    @property
    def step_ids(self) -> Seq[int]:
        """The tokens that the draft has written of the current step."""
        return self.draft_sequence.token_ids[self.base_len :]

    @property
    def is_stale(self) -> bool:
        """True if the sequence has grown past the tokens that its step continues."""
        is_drafted = self.phase in (Phase.DRAFT, Phase.JUDGE)
        return is_drafted and len(self.sequence.token_ids) != self.base_len

    @property
    def is_ready(self) -> bool:
        """True if the target has computed all its tokens but the last, the first of its output among them."""
        sequence = self.sequence
        is_running = sequence.status is SequenceStatus.RUNNING and not sequence.is_fetching
        return is_running and sequence.num_uncomputed_tokens == 1 and sequence.num_output_tokens > 0

    @property
    def stats(self) -> StepStats:
        return self.sequence.step_stats or StepStats()

    def hold(self) -> None:
        """Let the draft write on from the committed tokens, and the sequence compute nothing meanwhile."""
        self.phase = Phase.DRAFT
        self.base_len = len(self.sequence.token_ids)
        self.draft_sequence.token_ids += self.sequence.token_ids[len(self.draft_sequence.token_ids) :]
        self.sequence.is_held = True

    def submit(self, num_tokens: int, num_suffix_tokens: int, *, is_ending: bool) -> None:
        """Make the draft's first `num_tokens` a step for the next pass to judge."""
        self.phase = Phase.JUDGE
        self.is_ending = is_ending
        del self.draft_sequence.token_ids[self.base_len + num_tokens :]
        self.sequence.is_held = False
        self.sequence.draft_allowance = num_tokens + num_suffix_tokens

    def release(self) -> None:
        """Let the target go on by itself."""
        self.phase = Phase.TARGET
        self.base_len = len(self.sequence.token_ids)
        self.is_at_boundary = False
        self.sequence.is_held = False
        self.sequence.draft_allowance = self.sequence.num_draft_tokens

    def record(self, *, is_accepted: bool) -> None:
        """Count the verdict on the current step."""
        num_tokens = len(self.step_ids) if is_accepted else 0
        self.sequence.step_stats = self.stats + StepStats(1, int(is_accepted), num_tokens)

    def new_draft_sequence(self) -> RequestTokens:
        """Return a draft sequence of the committed tokens, which replaces the one before."""
        request = self.sequence.request
        self._num_draft_sequences += 1
        self.draft_sequence = RequestTokens(
            replace(
                request,
                request_id=f"{request.request_id}/step-{self._num_draft_sequences}",
                output_token_ids=tuple(self.sequence.token_ids[self.sequence.num_prompt_tokens :]),
                speculation=SpeculationParams(),
                prediction_token_ids=(),
            ),
            DraftRule(self.sequence.num_draft_tokens, self.sequence.verify, SpeculationMethod.MODEL),
        )
        return self.draft_sequence

    def query(self, num_tokens: int) -> UnscheduledQuery:
        """Return the query to the draft: up to `num_tokens` more of the step."""
        return UnscheduledQuery(self.draft_sequence, num_tokens)
