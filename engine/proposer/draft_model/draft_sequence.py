"""A draft model's own view of one sequence: the target's committed tokens, and KV blocks of the draft's pool."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.proposer.common_prefix import num_equal
from engine.proposer.vocab_mapping.translation import Translation
from engine.sampling.grammar import GrammarMatcher
from engine.sequence.sequence import Sequence
from engine.span import Span


class DraftSequence:
    """What a draft model has computed of a sequence.

    `spoken` is the sequence in the target's tokens, its `token_ids` the target's own list: what drafts are chosen by.
    `sequence` is the same in the draft's tokens, and holds the draft's blocks; where the vocabularies are one, the two
    are one object. `fed_ids` are drafts, in the draft's tokens, whose KV lies right behind the committed tokens of the
    round that made them, until `follow` has compared them with what was committed since. `last_round` is when the
    sequence was drafted for last.
    """

    def __init__(self, original: Sequence, translation: Translation, matcher: GrammarMatcher | None = None) -> None:
        """`matcher` has read the output that the request came with."""
        self.spoken = _twin(original, matcher)
        self.sequence = self.spoken
        self._translation = translation
        if not translation.is_identity:
            self.sequence = _twin(original)
            self.sequence.token_ids = []
        self._num_read = 0
        self._num_matched = len(self.spoken.token_ids)
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
        self.spoken.token_ids = original.token_ids
        if sequence is not self.spoken:
            sequence.token_ids += self._translation.read(original.token_ids[self._num_read :])
            self._num_read = len(original.token_ids)
        self._read_on()
        committed = sequence.token_ids[sequence.num_computed_tokens :][: len(self.fed_ids)]
        sequence.num_computed_tokens += num_equal(self.fed_ids, committed)
        sequence.num_computed_tokens = max(0, min(sequence.num_computed_tokens, len(sequence.token_ids) - 1))
        self.fed_ids = ()

    def _read_on(self) -> None:
        """Advance the grammar over what was committed; where it disagrees with the target's, drafts go without."""
        spoken = self.spoken
        if spoken.matcher is not None and not spoken.matcher.read(spoken.token_ids[self._num_matched :]):
            spoken.matcher = None
        self._num_matched = len(spoken.token_ids)

    @property
    def lead(self) -> int:
        """How many more tokens the draft reads than the target, maybe less than none."""
        return len(self.sequence.token_ids) - len(self.spoken.token_ids)

    def rewind(self, num_tokens: int, block_size: int) -> bool:
        """Only the first `num_tokens` of the draft's tokens are still what they were; False if a named block is not."""
        sequence = self.sequence
        if num_tokens < sequence.num_computed_tokens:
            sequence.num_computed_tokens = num_tokens
            self.fed_ids = ()
        del sequence.block_keys[num_tokens // block_size :]
        return sequence.num_keyed_blocks <= num_tokens // block_size

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


def _twin(original: Sequence, matcher: GrammarMatcher | None = None) -> Sequence:
    return Sequence(original.request, num_draft_tokens=0, verify=original.verify, arrival_s=0.0, matcher=matcher)
