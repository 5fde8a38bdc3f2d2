"""One step's work as the scheduler planned it: which sequences compute how many tokens, and which of them sample."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.sequence import Sequence
from engine.span import Span


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step: `token_ids[start : start + num_tokens]`, then at most `max_draft_tokens` drafts.

    The share is a prefill chunk when it ends before the committed tokens do; otherwise its last committed token and
    every draft are rows whose logits are sampled. Block slots for all of them are already in the block table.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    max_draft_tokens: int

    @property
    def is_sampled(self) -> bool:
        """True until the step is committed: then the sequence has grown past the share."""
        return self.start + self.num_tokens == len(self.sequence.token_ids)

    def span(self, draft_ids: Seq[int]) -> Span:
        """What the model computes for this share; a prefill chunk yields no logits and has no drafts."""
        token_ids = self.sequence.token_ids[self.start : self.start + self.num_tokens]
        token_ids += draft_ids
        num_logits = len(draft_ids) + 1 if self.is_sampled else 0
        return Span(token_ids, self.start, self.sequence.block_table, num_logits)


@dataclass(frozen=True, slots=True)
class Batch:
    """The shares of one step, sampled ones first; empty when there is nothing to compute."""

    shares: tuple[ScheduledSequence, ...]

    @property
    def sampled(self) -> tuple[ScheduledSequence, ...]:
        """The shares that yield tokens; read it before the step is committed."""
        return tuple(share for share in self.shares if share.is_sampled)

    def spans(self, draft_ids: Seq[Seq[int]]) -> list[Span]:
        """Spans in the order of `shares`, given the drafts of each sampled share."""
        padded = [*draft_ids, *([()] * (len(self.shares) - len(draft_ids)))]
        return [share.span(ids) for share, ids in zip(self.shares, padded, strict=True)]
