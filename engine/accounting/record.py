"""The record of one step. Everything that the engine counts and learns comes from these records.

The accepted rows of a pass, with the token after each, are a head's input.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.accounting.draft_cost import RequestedDrafts
from engine.accounting.step_times import StepTimes
from engine.sequence.batch import Batch, CheckedDraft, ScheduledSequence
from engine.sequence.sequence import Sequence
from engine.verifier.verify_task import VerifyResult


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
    def wants_tree(self) -> bool:
        """True if the proposer was asked for a tree; it may have answered with a chain."""
        return self.scheduled.max_tree_nodes > 0

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


@dataclass(slots=True)
class ClassPart:
    """One class's part of a pass: sequences, committed tokens, drafts, and requested rows by drafter."""

    drafter: str
    num_sequences: int = 0
    num_tokens: int = 0
    num_proposed: int = 0
    num_requested: dict[str, int] = field(default_factory=dict)


class PassParts:
    """The sums over the sequences of a pass, made in one loop: by class of requests, and by drafter.

    Attributes:
        classes: by name.
        requested: by the name for the cost of drafts (`drafter_of`).
        num_rows, num_tokens: the sampled rows, drafts included, and the committed tokens.
    """

    def __init__(self, passes: Seq[SequencePass]) -> None:
        self.num_sequences = self.num_rows = self.num_tokens = len(passes)
        self.classes: dict[str, ClassPart] = {}
        self.requested: dict[str, RequestedDrafts] = {}
        for scheduled, draft, outcome in passes:
            sequence, num_proposed = scheduled.sequence, len(draft.draft.token_ids)
            part = self.classes.get(sequence.draft_class)
            if part is None:
                part = self.classes[sequence.draft_class] = ClassPart(sequence.drafter)
            part.num_sequences += 1
            part.num_tokens += outcome.num_accepted + 1
            self.num_tokens += outcome.num_accepted
            part.num_proposed += num_proposed
            self.num_rows += num_proposed
            is_tree = scheduled.max_tree_nodes > 0
            num_requested = num_steps = scheduled.max_tree_nodes or scheduled.max_draft_tokens
            if num_requested == 0:
                continue
            if is_tree and num_proposed:
                num_steps = max(1, draft.depth)  # a draft whose first token is impossible has depth 0, and took a step
            drafter = drafter_of(sequence, is_tree=is_tree)
            steps, tokens = self.requested.get(drafter, _NOTHING)
            self.requested[drafter] = RequestedDrafts(max(steps, num_steps), tokens + num_requested)
            part.num_requested[drafter] = part.num_requested.get(drafter, 0) + num_requested


_NOTHING = RequestedDrafts(0, 0)


def drafter_of(sequence: Sequence, *, is_tree: bool) -> str:
    """Return the name for the cost of a sequence's drafts: its drafter, with chains or with trees."""
    return f"{sequence.drafter}-tree" if is_tree else sequence.drafter


@dataclass(frozen=True, slots=True)
class PassedRows:
    """One sequence's accepted rows, at positions [start, start + len(rows)).

    `rows` has their indices in the T rows of the pass, which are not consecutive for a tree. `next_ids` has the token
    after each row. If the pass has sampled the sequence (`is_newest`), the last id is the newest token to be committed.
    """

    sequence: Sequence
    start: int
    rows: Seq[int]
    next_ids: Seq[int]
    is_newest: bool

    @property
    def num_tokens(self) -> int:
        """Committed tokens up to the last of `next_ids`."""
        return self.start + len(self.rows) + 1


def passed_rows(batch: Batch, num_drafts: Seq[int], verified: Seq[VerifyResult]) -> list[PassedRows]:
    """Return the accepted rows of each scheduled sequence; call it before the commit.

    `num_drafts` and `verified` have an entry per sampled sequence.
    """
    passed = []
    first_row = 0
    num_sampled = len(verified)
    for index, scheduled in enumerate(batch.scheduled):
        # The committed tokens of the pass, with the token after each.
        end_row = first_row + scheduled.num_tokens
        rows = list(range(first_row, end_row))
        known = scheduled.sequence.token_ids[scheduled.start + 1 : scheduled.start + scheduled.num_tokens + 1]
        # The accepted drafts of a sampled sequence come after them.
        if index < num_sampled:
            outcome = verified[index]
            path = outcome.path or range(outcome.num_accepted)
            rows += [end_row + node for node in path]
            end_row += num_drafts[index]
            known = [*known, *outcome.token_ids]
        passed.append(PassedRows(scheduled.sequence, scheduled.start, rows, known, index < num_sampled))
        first_row = end_row
    return passed
