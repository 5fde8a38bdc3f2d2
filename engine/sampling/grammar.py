"""The tokens that a grammar allows next in one sequence; `engine.sampling.grammar_compiler` compiles grammars.

The parser is llguidance's. It is advanced over committed tokens only: reading drafts is rolled back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

from llguidance import LLMatcher

logger = logging.getLogger(__name__)

TokenMask = bytes  # one bit per token id, the lowest bit of the first byte is token 0; set where a token is allowed


class GrammarMatcher:
    """The state of one sequence's grammar after its committed output.

    Owned by the sequence and by the thread of its engine. Between two calls it has read exactly the tokens it was told
    to `read`; end tokens are allowed where the grammar accepts, and only there.
    """

    def __init__(self, matcher: LLMatcher, end_ids: Seq[int]) -> None:
        """Take over `matcher`, which is at the beginning of its grammar; `end_ids` end a text."""
        self._matcher = matcher
        self._end_ids = frozenset(end_ids)
        self.has_failed = False  # the parser hit one of its limits: from then on only end tokens are allowed

    def read(self, token_ids: Seq[int]) -> bool:
        """Advance over committed tokens for good; False if the grammar forbids one of them."""
        return not token_ids or self._matcher.consume_tokens(list(token_ids))

    def num_allowed(self, draft_ids: Seq[int]) -> int:
        """Count the leading drafts that the grammar lets follow what was read; all ids must be in the vocabulary."""
        if not draft_ids:
            return 0
        if self._matcher.is_stopped():  # it says that it allows nothing, and its mask has the end tokens
            return int(draft_ids[0] in self._end_ids)
        return self._matcher.validate_tokens(list(draft_ids))

    def masks(self, draft_ids: Seq[int]) -> list[TokenMask]:
        """Return the tokens allowed after 0, 1, ... and all of the drafts, each of which must be allowed itself."""
        masks, num_read = [self._mask()], 0
        for draft_id in draft_ids:
            num_read += self._advance([draft_id])
            masks.append(self._mask())
        self._roll_back(num_read)
        return masks

    def mask_after(self, draft_ids: Seq[int]) -> TokenMask | None:
        """Return the tokens allowed after these drafts; None where one of them is not allowed itself."""
        if self.num_allowed(draft_ids) < len(draft_ids):
            return None
        num_read = self._advance(draft_ids)
        mask = self._mask()
        self._roll_back(num_read)
        return mask

    def forced_ids(self, draft_ids: Seq[int], max_tokens: int) -> list[int]:
        """Return at most `max_tokens` tokens that must follow allowed drafts, as the tokenizer would spell them.

        The text is certain where there is any; its tokens are a guess, for the grammar may allow other spellings.
        """
        if max_tokens <= 0:
            return []
        num_read = self._advance(draft_ids)
        forced_ids = [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()
        self._roll_back(num_read)
        return forced_ids[:max_tokens]

    def _advance(self, draft_ids: Seq[int]) -> int:
        """Read drafts that are allowed and return how many there are to roll back.

        Where only the end of the text is left the parser stops: it takes an end token, and does not count it.
        """
        for num_read, draft_id in enumerate(draft_ids):
            if self._matcher.is_stopped():
                return num_read
            self._matcher.consume_token(draft_id)
        return len(draft_ids)

    def _mask(self) -> TokenMask:
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error() and not self.has_failed:
            self.has_failed = True
            logger.warning("a grammar ended its sequence early: %s", self._matcher.get_error())
        return mask

    def _roll_back(self, num_tokens: int) -> None:
        if num_tokens and not self.has_failed:
            self._matcher.rollback(num_tokens)
