"""The record of one step. Everything that the engine counts and learns comes from these records."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.accounting.step_times import StepTimes
from engine.sequence.batch import Batch, ScheduledSequence
from engine.sequence.checked_draft import CheckedDraft
from engine.sequence.sequence import Sequence
from engine.verifier.verify_result import VerifyResult


class SequencePass(NamedTuple):
    """One sampled sequence's part of a pass: its rows, its draft, and the result of the verification."""

    scheduled: ScheduledSequence
    draft: CheckedDraft
    outcome: VerifyResult

    @property
    def sequence(self) -> Sequence:
        return self.scheduled.sequence

    @property
    def num_requested(self) -> int:
        """The longest chain or the largest tree that the proposer was asked for; 0 if it was not asked."""
        return self.scheduled.max_tree_nodes or self.scheduled.max_draft_tokens

    @property
    def num_proposed(self) -> int:
        return len(self.draft.draft.token_ids)

    @property
    def num_accepted(self) -> int:
        return self.outcome.num_accepted


@dataclass(frozen=True, slots=True)
class PassRecord:
    """One committed pass.

    `num_decode_sequences` counts the sequences that had caught up when the step began. `num_decode_context_tokens` are
    their committed tokens at that time; `num_committed_tokens` are the tokens that the step added to them.
    """

    passes: tuple[SequencePass, ...] = ()  # one for each sampled sequence
    times: StepTimes = field(default_factory=StepTimes)
    num_prefill_tokens: int = 0
    num_decode_sequences: int = 0
    num_decode_context_tokens: int = 0
    num_committed_tokens: int = 0
    num_drafts: int = 0  # computed draft tokens
    is_ahead: bool = False  # the pass was issued before the host had read its input tokens
    is_followed: bool = False  # the next pass is already issued, without drafts

    @classmethod
    def of(
        cls, batch: Batch, passes: Seq[SequencePass], times: StepTimes, *, is_ahead: bool, is_followed: bool
    ) -> PassRecord:
        """Return the record of a pass after its commit: it counts how far the sequences have grown."""
        decoding = [scheduled for scheduled in batch.scheduled if scheduled.num_tokens == 1]
        num_context_tokens = sum(scheduled.start + 1 for scheduled in decoding)
        return cls(
            passes=tuple(passes),
            times=times,
            num_prefill_tokens=sum(scheduled.num_tokens for scheduled in batch.scheduled) - len(decoding),
            num_decode_sequences=len(decoding),
            num_decode_context_tokens=num_context_tokens,
            num_committed_tokens=sum(len(scheduled.sequence.token_ids) for scheduled in decoding) - num_context_tokens,
            num_drafts=sum(each.draft.num_valid for each in passes),
            is_ahead=is_ahead,
            is_followed=is_followed,
        )

    @property
    def num_prompt_rows(self) -> int:
        """Rows of the pass that only prefill: all but one row of each sampled sequence, and its drafts."""
        return self.num_prefill_tokens + self.num_decode_sequences - len(self.passes)
