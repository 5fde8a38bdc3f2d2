"""One step's work as the scheduler planned it: which sequences compute how many tokens, and which of them sample."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from engine.draft import NO_DRAFT, Draft
from engine.sequence.sequence import Sequence
from engine.span import Span


class ScheduledSequence(NamedTuple):
    """One sequence's rows of a step: `token_ids[start : start + num_tokens]`, then at most `max_draft_tokens` drafts.

    They are a prefill chunk when they end before the committed tokens do; otherwise the last committed token and
    every draft are rows whose logits are sampled. Block slots for all of them are already in the block table.

    Where `max_tree_nodes` is not 0 the drafts may be a tree of so many nodes, none deeper than `max_draft_tokens`.
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
        """Rows, and slots, that its drafts may take."""
        return max(self.max_draft_tokens, self.max_tree_nodes)

    @property
    def is_sampled(self) -> bool:
        """True until the step is committed: then the sequence has grown past these rows."""
        return self.start + self.num_tokens == len(self.sequence.token_ids)

    @property
    def num_scored_rows(self) -> int:
        """Rows before the sampled ones whose logits are wanted for the prompt's log-probabilities."""
        if self.sequence.sampling.num_prompt_logprobs is None:
            return 0
        return self.num_tokens - self.is_sampled if self.sequence.is_scoring else 0

    def num_logits(self, num_drafts: int) -> int:
        """Count the last rows whose logits are wanted; none of most prefill chunks, which have no drafts."""
        return self.num_scored_rows + (num_drafts + 1 if self.is_sampled else 0)

    def span(self, draft_ids: Seq[int], parents: Seq[int] = ()) -> Span:
        """Return what the model computes; `parents` make the drafts a tree."""
        sequence = self.sequence
        token_ids = sequence.token_ids[self.start : self.start + self.num_tokens]
        token_ids += draft_ids
        return Span(token_ids, self.start, sequence.block_table, self.num_logits(len(draft_ids)), parents)


@dataclass(frozen=True, slots=True)
class Batch:
    """The scheduled sequences of one step, sampled ones first; empty when there is nothing to compute.

    `sampled` are those that yield tokens.
    """

    scheduled: tuple[ScheduledSequence, ...]
    sampled: tuple[ScheduledSequence, ...]

    def num_logits(self, num_drafts: Seq[int]) -> list[int]:
        """Count the rows of logits of each scheduled sequence, in order, given the drafts of each sampled one."""
        padded = [*num_drafts, *([0] * (len(self.scheduled) - len(num_drafts)))]
        return [scheduled.num_logits(count) for scheduled, count in zip(self.scheduled, padded, strict=True)]

    def spans(self, drafts: Seq[Draft]) -> list[Span]:
        """Return the span of each scheduled sequence, in order, given the drafts of each sampled one."""
        padded = [*drafts, *([NO_DRAFT] * (len(self.scheduled) - len(drafts)))]
        pairs = zip(self.scheduled, padded, strict=True)
        return [scheduled.span(draft.token_ids, draft.parents) for scheduled, draft in pairs]
