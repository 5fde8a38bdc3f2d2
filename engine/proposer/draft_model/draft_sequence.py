"""The draft's copy of a sequence: the target's committed tokens as the draft reads them, and blocks of its pool."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.proposer.common_prefix import num_equal
from engine.proposer.growth.chain import Chain
from engine.proposer.vocab_mapping.translation import Translation
from engine.sampling.grammar import GrammarMatcher
from engine.sequence.request_tokens import RequestTokens
from engine.sequence.token_blocks import TokenBlocks
from engine.span import Span


class DraftSequence:
    """A sequence as a draft model reads it, and what it has computed of it.

    Attributes:
        target_sequence: the sequence in the target's tokens, by which drafts are chosen.
        blocks: the same in the draft's tokens, with the draft's blocks; where the vocabularies are one, both have one
            list of tokens.
        matcher: the draft's own, at the end of the committed tokens; None where drafts go without a grammar.
        unverified_ids: drafts, in the draft's tokens, whose KV lies right behind the committed tokens of the round
            that made them, until `sync` has compared them with what was committed since.
        last_round: the last round in which the sequence was drafted for.
    """

    def __init__(
        self, target_sequence: RequestTokens, translation: Translation, matcher: GrammarMatcher | None = None
    ) -> None:
        """`matcher` has read the output that the request came with."""
        request = target_sequence.request
        self.blocks = TokenBlocks([], request.cache_salt)
        self.matcher = matcher
        self.unverified_ids: Seq[int] = ()
        self.last_round = 0
        self._translation = translation
        self._num_read = 0
        self._num_matched = len(request.prompt_token_ids) + len(request.output_token_ids)
        self.sync(target_sequence)

    @property
    def num_missing_tokens(self) -> int:
        """Committed tokens whose KV is not there, plus the last one: its logits are needed again if it is."""
        return self.blocks.num_uncomputed_tokens

    @property
    def position_offset(self) -> int:
        """Tokens that the draft reads beyond the target's count; negative where it reads fewer."""
        return len(self.blocks.token_ids) - len(self.target_sequence.token_ids)

    def sync(self, target_sequence: RequestTokens) -> None:
        """Take the tokens committed since the last round; KV of drafts that stood is kept, the rest is overwritten."""
        self.target_sequence = target_sequence
        self._read(target_sequence.token_ids)
        blocks = self.blocks
        committed = blocks.token_ids[blocks.num_computed_tokens :][: len(self.unverified_ids)]
        num_computed = blocks.num_computed_tokens + num_equal(self.unverified_ids, committed)
        blocks.num_computed_tokens = max(0, min(num_computed, len(blocks.token_ids) - 1))
        self.unverified_ids = ()

    def rewind(self, num_tokens: int, block_size: int) -> bool:
        """Keep only the first `num_tokens` of the draft's tokens; False if a keyed block has others too."""
        blocks = self.blocks
        if num_tokens < blocks.num_computed_tokens:
            blocks.num_computed_tokens = num_tokens
            self.unverified_ids = ()
        del blocks.block_keys[num_tokens // block_size :]
        return blocks.num_keyed_blocks <= num_tokens // block_size

    def next_span(self, max_tokens: int, draft_ids: Seq[int] = ()) -> Span:
        """Up to `max_tokens` of the missing tokens; behind the last one `draft_ids`, and a row of logits for each."""
        blocks = self.blocks
        start = blocks.num_computed_tokens
        end = min(start + max_tokens, len(blocks.token_ids))
        token_ids = blocks.token_ids[start:end]
        if end < len(blocks.token_ids):
            return Span(token_ids, start, blocks.block_table, 0)
        return Span([*token_ids, *draft_ids], start, blocks.block_table, len(draft_ids) + 1)

    def chain(self, prefix_ids: Seq[int], block_table: Seq[int], num_drafts: int) -> Chain:
        """Return a chain of `num_drafts` drafts behind `prefix_ids` (the target's), whose KV goes to `block_table`."""
        target, offset = self.target_sequence, self.position_offset
        return Chain(target, prefix_ids, block_table, num_drafts, matcher=self.matcher, position_offset=offset)

    def computed(self, span: Span) -> None:
        """A `next_span` has been computed, in slots that follow the committed tokens where it has drafts."""
        blocks = self.blocks
        blocks.num_computed_tokens = min(span.end, len(blocks.token_ids))
        self.unverified_ids = tuple(span.token_ids[len(span.token_ids) - (span.end - blocks.num_computed_tokens) :])

    def _read(self, token_ids: list[int]) -> None:
        """Read on in the target's tokens; where the grammar disagrees with the target's, drafts go without."""
        if self._translation.is_identity:
            self.blocks.token_ids = token_ids
        else:
            self.blocks.token_ids += self._translation.read(token_ids[self._num_read :])
            self._num_read = len(token_ids)
        if self.matcher is not None and not self.matcher.read(token_ids[self._num_matched :]):
            self.matcher = None
        self._num_matched = len(token_ids)
