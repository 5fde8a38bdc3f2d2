"""A draft model's own view of one sequence: the target's committed tokens, and KV blocks of the draft's pool."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.grammar import GrammarMatcher
from engine.sequence import Sequence
from engine.span import Span


class Mirror:
    """What a draft model has computed of a sequence.

    `sequence` holds the draft's blocks; its `token_ids` are the target's own list. `fed_ids` are drafts whose KV lies
    right behind the committed tokens of the round that made them, until `follow` has compared them with what was
    committed since. `last_round` is when the sequence was drafted for last.
    """

    def __init__(self, original: Sequence, matcher: GrammarMatcher | None = None) -> None:
        """`matcher` has read the output that the request came with."""
        self.sequence = Sequence(
            original.request, num_draft_tokens=0, verify=original.verify, arrival_s=0.0, matcher=matcher
        )
        self._num_read = len(self.sequence.token_ids)
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
        self._read_on()
        committed = sequence.token_ids[sequence.num_computed_tokens :][: len(self.fed_ids)]
        sequence.num_computed_tokens += _num_equal(self.fed_ids, committed)
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, len(sequence.token_ids) - 1)
        self.fed_ids = ()

    def _read_on(self) -> None:
        """Advance the grammar over what was committed; where it disagrees with the target's, drafts go without."""
        sequence = self.sequence
        if sequence.matcher is not None and not sequence.matcher.read(sequence.token_ids[self._num_read :]):
            sequence.matcher = None
        self._num_read = len(sequence.token_ids)

    def next_span(self, max_tokens: int, draft_ids: Seq[int] = ()) -> Span:
        """Up to `max_tokens` of the missing tokens; behind the last one `draft_ids`, and a row of logits for each."""
        sequence = self.sequence
        start = sequence.num_computed_tokens
        end = min(start + max_tokens, len(sequence.token_ids))
        token_ids = sequence.token_ids[start:end]
        if end < len(sequence.token_ids):
            return Span(token_ids, start, sequence.block_table, 0)
        return Span([*token_ids, *draft_ids], start, sequence.block_table, len(draft_ids) + 1)

    def computed(self, span: Span) -> None:
        """A `next_span` has been computed, in slots that follow the committed tokens where it has drafts."""
        sequence = self.sequence
        sequence.num_computed_tokens = min(span.end, len(sequence.token_ids))
        self.fed_ids = tuple(span.token_ids[len(span.token_ids) - (span.end - sequence.num_computed_tokens) :])


def _num_equal(left: Seq[int], right: Seq[int]) -> int:
    """Length of the common prefix."""
    num_equal = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        num_equal += 1
    return num_equal
