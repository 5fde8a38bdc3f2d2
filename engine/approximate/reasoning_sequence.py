"""A sequence whose reasoning steps the draft may write, with the draft's copy of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from enum import Enum, auto

from engine.sequence.draft_query import UnscheduledQuery
from engine.sequence.request_tokens import DraftRule, RequestTokens
from engine.sequence.sequence import Sequence, SequenceStatus
from protos.messages import SpeculationMethod, SpeculationParams, StepStats


class Phase(Enum):
    """The state of a step. Every step begins and ends in TARGET or ACCEPTED.

    TARGET: the target writes a step, with exact drafts. DRAFT: the draft writes, and the target does not schedule the
    sequence. SCORE: the step is complete, and the next pass scores it. ACCEPTED: that pass has committed it.
    """

    TARGET = auto()
    DRAFT = auto()
    SCORE = auto()
    ACCEPTED = auto()


class ReasoningSequence:
    """A sequence and the reasoning step that the draft writes for it.

    `sequence` belongs to the target. `draft_sequence` is the draft's copy: the committed tokens and the step so far. A
    draft cannot remove tokens, so a rejected step is followed by a new copy under a new id. The current step begins at
    `base_len`. The first `num_seen` committed tokens have been searched for its end; `is_at_boundary` is True once the
    end is found.
    """

    def __init__(self, sequence: Sequence, threshold: float) -> None:
        self.sequence = sequence
        self.threshold = threshold
        self.phase = Phase.TARGET
        self.base_len = self.num_seen = len(sequence.token_ids)
        self.is_thinking = False
        self.is_at_boundary = True
        self.is_ending = False  # the draft would end the reasoning after the submitted step
        self.is_proposed = False  # the step is in the current pass
        self._num_draft_sequences = 0
        self.draft_sequence = self.new_draft_sequence()

    @property
    def step_ids(self) -> Seq[int]:
        """The current step's tokens, as far as the draft has written them."""
        return self.draft_sequence.token_ids[self.base_len :]

    @property
    def is_stale(self) -> bool:
        """True if the sequence has grown past the tokens that its step continues."""
        is_drafted = self.phase in (Phase.DRAFT, Phase.SCORE)
        return is_drafted and len(self.sequence.token_ids) != self.base_len

    @property
    def is_ready(self) -> bool:
        """True if the target decodes: it has output, and only the last token is not computed."""
        sequence = self.sequence
        is_running = sequence.status is SequenceStatus.RUNNING and not sequence.is_fetching
        return is_running and sequence.num_uncomputed_tokens == 1 and sequence.num_output_tokens > 0

    @property
    def stats(self) -> StepStats:
        return self.sequence.step_stats or StepStats()

    def hold(self) -> None:
        """Let the draft write a step after the committed tokens; the engine does not schedule the sequence then."""
        self.phase = Phase.DRAFT
        self.base_len = len(self.sequence.token_ids)
        self.draft_sequence.token_ids += self.sequence.token_ids[len(self.draft_sequence.token_ids) :]
        self.sequence.is_held = True

    def submit(self, num_tokens: int, num_suffix_tokens: int, *, is_ending: bool) -> None:
        """Submit the draft's first `num_tokens` tokens as a step, which the next pass scores."""
        self.phase = Phase.SCORE
        self.is_ending = is_ending
        del self.draft_sequence.token_ids[self.base_len + num_tokens :]
        self.sequence.is_held = False
        self.sequence.draft_allowance = num_tokens + num_suffix_tokens

    def release(self) -> None:
        """Let the target write the next step."""
        self.phase = Phase.TARGET
        self.base_len = len(self.sequence.token_ids)
        self.is_at_boundary = False
        self.sequence.is_held = False
        self.sequence.draft_allowance = self.sequence.num_draft_tokens

    def record(self, *, is_accepted: bool) -> None:
        """Count the current step as accepted or rejected."""
        num_tokens = len(self.step_ids) if is_accepted else 0
        self.sequence.step_stats = self.stats + StepStats(1, int(is_accepted), num_tokens)

    def new_draft_sequence(self) -> RequestTokens:
        """Replace the draft sequence by a new one of the committed tokens, and return it."""
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
        """Return a query for up to `num_tokens` more tokens of the step."""
        return UnscheduledQuery(self.draft_sequence, num_tokens)
