"""Token ids and the blocks that hold their KV: the block manager's view of a sequence.

It does not depend on requests, sampling or scheduling.
"""

from __future__ import annotations

from array import array

from engine.batch.span import SpanStates
from protos.block_keys import BlockKey

ZEROS = 0  # the slot of the state before the first token; nothing is written to it


class TokenBlocks:
    """Tokens with a block table over one pool.

    The KV of `token_ids[:num_computed_tokens]` is in the blocks of `block_table`. `token_ids` only grow, except in a
    draft with its own tokenizer, which tokenizes the end of the text again.

    Args:
        token_ids: kept by reference; the owner may append to it.
        cache_salt: part of every key; tokens of different salts never share a block.
    """

    def __init__(self, token_ids: list[int], cache_salt: str = "") -> None:
        self.token_ids = token_ids
        self.cache_salt = cache_salt
        self.num_computed_tokens = 0
        self.block_table: array[int] = array("i")
        self.block_keys: list[BlockKey] = []  # keys of the leading full blocks, computed on demand
        self.states: dict[int, int] = {}  # slots of recurrent states by the number of tokens that they follow
        self.num_shared_tokens = 0  # leading tokens whose blocks were findable at admission
        self.num_keyed_blocks = 0  # leading blocks of `block_table` that are in the prefix cache under these keys

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is not written yet; 1 when the prompt is computed, never 0."""
        return len(self.token_ids) - self.num_computed_tokens

    def span_states(self, start: int, end: int) -> SpanStates:
        """Return the slots of the states before and within the tokens [start, end)."""
        before = self.states[start] if start else ZEROS
        return SpanStates(before, {at - start: slot for at, slot in self.states.items() if start < at <= end})

    @property
    def is_scoring(self) -> bool:
        """True if every token needs logits. Then no block may come from the cache, which has no logits."""
        return False
