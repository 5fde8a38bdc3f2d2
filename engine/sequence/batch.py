"""The scheduler's plan of one step: how many tokens each sequence computes, and which sequences sample."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from engine.batch.draft import NO_DRAFT, Draft
from engine.batch.span import Span
from engine.sequence.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """One sequence's rows of a step: `token_ids[start : start + num_tokens]`, then at most `max_draft_tokens` drafts.

    Rows that end before the last committed token are a prefill chunk. Otherwise the last committed token and every
    draft are sampled. The block table already has slots for all rows.

    If `max_tree_nodes` is not 0, the drafts may be a tree of at most so many nodes and at most `max_draft_tokens` deep.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    max_draft_tokens: int
    max_tree_nodes: int = 0

    @property
    def draft_start(self) -> int:
        """KV index of the first draft."""
        return self.start + self.num_tokens

    @property
    def max_draft_rows(self) -> int:
        """Rows and slots that the drafts may take."""
        return max(self.max_draft_tokens, self.max_tree_nodes)

    @property
    def is_sampled(self) -> bool:
        """True until the step is committed: then the sequence has grown past these rows."""
        return self.start + self.num_tokens == len(self.sequence.token_ids)

    @property
    def num_scored_rows(self) -> int:
        """Rows before the sampled ones that the prompt's log-probabilities need logits of."""
        if self.sequence.sampling.num_prompt_logprobs is None:
            return 0
        return self.num_tokens - self.is_sampled if self.sequence.is_scoring else 0

    def num_logits(self, num_drafts: int) -> int:
        """Count the rows, at the end, whose logits are computed; 0 for most prefill chunks."""
        return self.num_scored_rows + (num_drafts + 1 if self.is_sampled else 0)

    def span(self, draft_ids: Seq[int], parents: Seq[int] = ()) -> Span:
        """Return the model's input. `parents` make the drafts a tree."""
        sequence = self.sequence
        token_ids = sequence.token_ids[self.start : self.start + self.num_tokens]
        token_ids += draft_ids
        states = sequence.span_states(self.start, self.start + len(token_ids)) if sequence.states else None
        return Span(token_ids, self.start, sequence.block_table, self.num_logits(len(draft_ids)), parents, states)


@dataclass(frozen=True, slots=True)
class Batch:
    """The scheduled sequences of one step, sampled ones first. Empty when there is nothing to compute.

    `sampled` are the sequences that emit tokens.
    """

    scheduled: tuple[ScheduledSequence, ...]
    sampled: tuple[ScheduledSequence, ...]

    def num_logits(self, num_drafts: Seq[int]) -> list[int]:
        """Count the logits rows of each scheduled sequence, in order. `num_drafts` has one count per sampled one."""
        padded = [*num_drafts, *([0] * (len(self.scheduled) - len(num_drafts)))]
        return [scheduled.num_logits(count) for scheduled, count in zip(self.scheduled, padded, strict=True)]

    def spans(self, drafts: Seq[Draft]) -> list[Span]:
        """Return the span of each scheduled sequence, in order. `drafts` has one draft per sampled one."""
        padded = [*drafts, *([NO_DRAFT] * (len(self.scheduled) - len(drafts)))]
        pairs = zip(self.scheduled, padded, strict=True)
        return [scheduled.span(draft.token_ids, draft.parents) for scheduled, draft in pairs]
