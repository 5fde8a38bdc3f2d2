"""The draft's copy of a sequence: the committed tokens in the draft's vocabulary, with blocks of the draft's pool."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.batch.span import Span
from engine.proposer.common_prefix import num_equal
from engine.proposer.growth.chain import Chain
from engine.proposer.vocab_mapping.translation import Translation
from engine.sampling.grammar import GrammarMatcher
from engine.sequence.request_tokens import RequestTokens, TokenBlocks


class DraftSequence:
    """A sequence in a draft model, and its computed tokens.

    Attributes:
        target_sequence: The sequence in the target's tokens, which choose the drafts.
        blocks: The sequence in the draft's tokens, with the draft's blocks. With one vocabulary, both share one list of
            tokens.
        matcher: The draft's own grammar matcher, after the committed tokens; None if drafts ignore the grammar.
        unverified_ids: Drafts of the last round, in the draft's tokens. Their KV follows that round's committed tokens,
            until `sync` has compared them with the newly committed tokens.
        last_round: The last round that drafted for the sequence.
    """

    def __init__(
        self, target_sequence: RequestTokens, translation: Translation, matcher: GrammarMatcher | None = None
    ) -> None:
        """`matcher` has accepted the output that the request came with."""
        request = target_sequence.request
        self.blocks = TokenBlocks([], request.cache_salt)
        self.matcher = matcher
        self.unverified_ids: Seq[int] = ()
        self.last_round = 0
        self._translation = translation
        self._num_translated = 0
        self._num_matched = len(request.prompt_token_ids) + len(request.output_token_ids)
        self.sync(target_sequence)

    @property
    def num_missing_tokens(self) -> int:
        """The number of committed tokens to compute, at least the last one, whose logits are needed."""
        return self.blocks.num_uncomputed_tokens

    @property
    def position_offset(self) -> int:
        """The draft's number of tokens minus the target's."""
        return len(self.blocks.token_ids) - len(self.target_sequence.token_ids)

    def sync(self, target_sequence: RequestTokens) -> None:
        """Add the tokens committed since the last round; keep the KV of accepted drafts, and drop the others."""
        self.target_sequence = target_sequence
        self._extend(target_sequence.token_ids)
        blocks = self.blocks
        committed = blocks.token_ids[blocks.num_computed_tokens :][: len(self.unverified_ids)]
        num_computed = blocks.num_computed_tokens + num_equal(self.unverified_ids, committed)
        blocks.num_computed_tokens = max(0, min(num_computed, len(blocks.token_ids) - 1))
        self.unverified_ids = ()

    def rewind(self, num_tokens: int, block_size: int) -> bool:
        """Keep only the first `num_tokens` of the draft's tokens; False if a keyed block also has later tokens."""
        blocks = self.blocks
        if num_tokens < blocks.num_computed_tokens:
            blocks.num_computed_tokens = num_tokens
            self.unverified_ids = ()
        del blocks.block_keys[num_tokens // block_size :]
        return blocks.num_keyed_blocks <= num_tokens // block_size

    def next_span(self, max_tokens: int, draft_ids: Seq[int] = ()) -> Span:
        """Return a span of up to `max_tokens` missing tokens.

        After the last missing token come `draft_ids`, and it and each draft get a row of logits.
        """
        blocks = self.blocks
        start = blocks.num_computed_tokens
        end = min(start + max_tokens, len(blocks.token_ids))
        token_ids = blocks.token_ids[start:end]
        if end < len(blocks.token_ids):
            return Span(token_ids, start, blocks.block_table, 0)
        return Span([*token_ids, *draft_ids], start, blocks.block_table, len(draft_ids) + 1)

    def chain(self, prefix_ids: Seq[int], block_table: Seq[int], num_drafts: int) -> Chain:
        """Return a chain of `num_drafts` tokens after `prefix_ids` (the target's); its KV goes to `block_table`."""
        target, offset = self.target_sequence, self.position_offset
        return Chain(target, prefix_ids, block_table, num_drafts, matcher=self.matcher, position_offset=offset)

    def computed(self, span: Span) -> None:
        """Record that a `next_span` was computed; its drafts are in the slots after the committed tokens."""
        blocks = self.blocks
        blocks.num_computed_tokens = min(span.end, len(blocks.token_ids))
        self.unverified_ids = tuple(span.token_ids[len(span.token_ids) - (span.end - blocks.num_computed_tokens) :])

    def _extend(self, token_ids: list[int]) -> None:
        """Add new tokens of the target; if the draft's grammar rejects them, drop the grammar."""
        if self._translation.is_identity:
            self.blocks.token_ids = token_ids
        else:
            self.blocks.token_ids += self._translation.to_draft(token_ids[self._num_translated :])
            self._num_translated = len(token_ids)
        if self.matcher is not None and not self.matcher.read(token_ids[self._num_matched :]):
            self.matcher = None
        self._num_matched = len(token_ids)
