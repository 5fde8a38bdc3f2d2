"""One step's work as the scheduler planned it: which sequences compute how many tokens, and which of them sample."""

from __future__ import annotations

from dataclasses import dataclass

from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's share of a step: `token_ids[start : start + num_tokens]`, then at most `max_draft_tokens` drafts.

    The share is a prefill chunk when it ends before the committed tokens do; otherwise its last committed token and every
    draft are rows whose logits are sampled. Block slots for all of them are already in the block table.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    max_draft_tokens: int

    @property
    def is_sampled(self) -> bool:
        return self.start + self.num_tokens == len(self.sequence.token_ids)


@dataclass(frozen=True, slots=True)
class Batch:
    """The shares of one step, sampled ones first; empty when there is nothing to compute."""

    shares: tuple[ScheduledSequence, ...]

    @property
    def sampled(self) -> tuple[ScheduledSequence, ...]:
        return tuple(share for share in self.shares if share.is_sampled)
