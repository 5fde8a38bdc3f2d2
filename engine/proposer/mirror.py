"""A draft model's own view of one sequence: the target's committed tokens, and KV blocks of the draft's pool."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.sequence import Sequence
from engine.span import Span


class Mirror:
    """What a draft model has computed of a sequence.

    `sequence` holds the draft's blocks; its `token_ids` are the target's own list. `fed_ids` are drafts whose KV lies
    right behind the committed tokens of the round that made them, until `catch_up` has compared them with what was
    committed since. `last_round` is when the sequence was drafted for last.
    """

    def __init__(self, original: Sequence) -> None:
        self.sequence = Sequence(original.request, num_draft_tokens=0, verify=original.verify, arrival_s=0.0)
        self.fed_ids: Seq[int] = ()
        self.last_round = 0
        self.follow(original)

    @property
    def num_missing_tokens(self) -> int:
        """Committed tokens whose KV is not there, plus the last one: its logits are needed again if it is."""
        return self.sequence.num_uncomputed_tokens

    def follow(self, original: Sequence) -> None:
        """Take the tokens committed since the last round; KV of drafts that stood is kept, the rest is overwritten."""
        sequence = self.sequence
        sequence.token_ids = original.token_ids
        committed = sequence.token_ids[sequence.num_computed_tokens :][: len(self.fed_ids)]
        sequence.num_computed_tokens += _num_equal(self.fed_ids, committed)
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, len(sequence.token_ids) - 1)
        self.fed_ids = ()

    def next_span(self, max_tokens: int) -> Span:
        """Up to `max_tokens` of the missing tokens; the one that includes the last yields its logits."""
        sequence = self.sequence
        start = sequence.num_computed_tokens
        end = min(start + max_tokens, len(sequence.token_ids))
        is_last = end == len(sequence.token_ids)
        return Span(sequence.token_ids[start:end], start, sequence.block_table, int(is_last))


def _num_equal(left: Seq[int], right: Seq[int]) -> int:
    """Length of the common prefix."""
    num_equal = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        num_equal += 1
    return num_equal
