"""A grammar that starts after the model's thought."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.sampling.grammar import CompiledGrammar, GrammarMatcher, TokenMask
from protos.messages import Thought


class ThoughtfulMatcher(GrammarMatcher):
    """A `GrammarMatcher` of the tokens after a thought. Inside the thought, all tokens are allowed except end tokens.

    If the prompt does not open the thought, its begin token is allowed in addition to the grammar's tokens, at the
    first position only.
    """

    def __init__(self, grammar: CompiledGrammar, end_ids: Seq[int], thought: Thought, num_mask_bytes: int) -> None:
        super().__init__(grammar, end_ids)
        self._thought = thought
        self._tail: tuple[int, ...] = ()  # the last tokens of the thought, which may be a prefix of its end
        self._is_opening = thought.begin_id is not None  # no token has been read yet
        self._is_bound = False  # the grammar has started
        self._free_mask = _without(end_ids, b"\xff" * num_mask_bytes)

    def read(self, token_ids: Seq[int]) -> bool:
        start = self._start_in(token_ids)
        self._is_opening &= not token_ids
        if start is None:
            last = (*self._tail, *token_ids)
            self._tail = last[max(len(last) - len(self._thought.end_ids) + 1, 0) :]
            return True
        self._is_bound = True
        return super().read(token_ids[start:])

    def num_allowed(self, draft_ids: Seq[int]) -> int:
        start = self._start_in(draft_ids)
        for rank, draft_id in enumerate(draft_ids[:start]):
            if draft_id in self._end_ids:
                return rank
        return len(draft_ids) if start is None else start + super().num_allowed(draft_ids[start:])

    def masks(self, draft_ids: Seq[int]) -> list[TokenMask]:
        start = self._start_in(draft_ids)
        masks = [self._free_mask] * (len(draft_ids) + 1 if start is None else start)
        if start is not None:
            masks += super().masks(draft_ids[start:])
        if self._is_opening:
            masks[0] = self._opening_mask()
        return masks

    def mask_after(self, draft_ids: Seq[int]) -> TokenMask | None:
        if not draft_ids and self._is_opening:
            return self._opening_mask()
        start = self._start_in(draft_ids)
        if self._end_ids & set(draft_ids[:start]):
            return None
        return self._free_mask if start is None else super().mask_after(draft_ids[start:])

    def forced_ids(self, draft_ids: Seq[int], max_tokens: int) -> list[int]:
        start = self._start_in(draft_ids)
        return [] if start is None else super().forced_ids(draft_ids[start:], max_tokens)

    def _start_in(self, token_ids: Seq[int]) -> int | None:
        """Return the index of the first of these next tokens that belongs to the grammar; None without one."""
        if self._is_bound:
            return 0
        if self._is_opening and token_ids and token_ids[0] != self._thought.begin_id:
            return 0
        last_id = self._thought.end_ids[-1]
        ends = (rank + 1 for rank, token_id in enumerate(token_ids) if token_id == last_id)
        return next((end for end in ends if self._is_end(token_ids[:end])), None)

    def _is_end(self, token_ids: Seq[int]) -> bool:
        """True if the thought ends after these tokens."""
        end_ids = self._thought.end_ids
        return (*self._tail, *token_ids[-len(end_ids) :])[-len(end_ids) :] == end_ids

    def _opening_mask(self) -> TokenMask:
        mask, begin_id = bytearray(super().masks(())[0]), self._thought.begin_id
        assert begin_id is not None
        mask[begin_id // 8] |= 1 << begin_id % 8
        return bytes(mask)


def _without(token_ids: Seq[int], mask: TokenMask) -> TokenMask:
    made = bytearray(mask)
    for token_id in token_ids:
        made[token_id // 8] &= ~(1 << token_id % 8)
    return bytes(made)
