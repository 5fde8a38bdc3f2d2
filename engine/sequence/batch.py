"""One step's work as the scheduler planned it: which sequences compute how many tokens, and which of them sample."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.draft import NO_DRAFT, Draft
from engine.sequence.sequence import Sequence
from engine.span import Span


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step: `token_ids[start : start + num_tokens]`, then at most `max_draft_tokens` drafts.

    The share is a prefill chunk when it ends before the committed tokens do; otherwise its last committed token and
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
        """Place of the first draft."""
        return self.start + self.num_tokens

    @property
    def max_draft_rows(self) -> int:
        """Rows, and slots, that its drafts may take."""
        return max(self.max_draft_tokens, self.max_tree_nodes)

    @property
    def is_sampled(self) -> bool:
        """True until the step is committed: then the sequence has grown past the share."""
        return self.start + self.num_tokens == len(self.sequence.token_ids)

    @property
    def num_scored_rows(self) -> int:
        """Rows before the sampled ones whose logits are wanted for the prompt's log-probabilities."""
        return self.num_tokens - self.is_sampled if self.sequence.is_scoring else 0

    def num_logits(self, num_drafts: int) -> int:
        """Rows at the end of the share whose logits are wanted; none of most prefill chunks, which have no drafts."""
        return self.num_scored_rows + (num_drafts + 1 if self.is_sampled else 0)

    def span(self, draft_ids: Seq[int], parents: Seq[int] = ()) -> Span:
        """What the model computes for this share; `parents` make its drafts a tree."""
        token_ids = self.sequence.token_ids[self.start : self.start + self.num_tokens]
        token_ids += draft_ids
        return Span(token_ids, self.start, self.sequence.block_table, self.num_logits(len(draft_ids)), parents)


@dataclass(frozen=True, slots=True)
class Batch:
    """The shares of one step, sampled ones first; empty when there is nothing to compute."""

    shares: tuple[ScheduledSequence, ...]

    @property
    def sampled(self) -> tuple[ScheduledSequence, ...]:
        """The shares that yield tokens; read it before the step is committed."""
        return tuple(share for share in self.shares if share.is_sampled)

    def num_logits(self, num_drafts: Seq[int]) -> list[int]:
        """Rows of logits that each share yields, in the order of `shares`, given the drafts of each sampled share."""
        padded = [*num_drafts, *([0] * (len(self.shares) - len(num_drafts)))]
        return [share.num_logits(count) for share, count in zip(self.shares, padded, strict=True)]

    def spans(self, drafts: Seq[Draft]) -> list[Span]:
        """Spans in the order of `shares`, given the drafts of each sampled share."""
        padded = [*drafts, *([NO_DRAFT] * (len(self.shares) - len(drafts)))]
        return [share.span(draft.token_ids, draft.parents) for share, draft in zip(self.shares, padded, strict=True)]
