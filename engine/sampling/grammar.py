"""Tracks the tokens that a grammar allows next in one sequence. `engine.sampling.grammar_compiler` compiles grammars.

The parser is llguidance's. It advances over committed tokens; drafts are read and rolled back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq

from llguidance import LLMatcher

from protos.client_text import for_log

logger = logging.getLogger(__name__)

TokenMask = bytes  # one bit per token id, set if the token is allowed; token 0 is the lowest bit of the first byte


class GrammarMatcher:
    """The state of one sequence's grammar after its committed output.

    The sequence owns it, and only the engine's thread uses it. Between two calls, the parser has consumed exactly the
    tokens passed to `read`. End tokens are allowed exactly where the grammar accepts.
    """

    def __init__(self, begin: Callable[[], LLMatcher], end_ids: Seq[int]) -> None:
        """`begin` returns a parser at the start of the grammar; `end_ids` are the end tokens."""
        self._begin = begin
        self._matcher = begin()
        self._end_ids = frozenset(end_ids)
        self._read_ids: list[int] = []
        self.has_failed = False  # the committed output is incomplete, and no token can follow it

    def read(self, token_ids: Seq[int]) -> bool:
        """Consume committed tokens. Returns False if the grammar forbids one of them or its parser failed."""
        for token_id in token_ids:
            is_end = token_id in self._end_ids
            is_right = self._matcher.is_accepting() if is_end else self._matcher.consume_token(token_id)
            if not is_right and not self.has_failed:
                self.has_failed = True
                logger.warning("a grammar ended its sequence early: %s", for_log(self._matcher.get_error()))
            if not is_end:
                self._read_ids.append(token_id)
        return not self.has_failed

    def num_allowed(self, draft_ids: Seq[int]) -> int:
        """Count the leading drafts that the grammar allows next. All ids must be in the vocabulary."""
        if not draft_ids:
            return 0
        if self._matcher.is_stopped():  # a stopped parser validates no token, although its mask has the end tokens
            return int(draft_ids[0] in self._end_ids)
        num_allowed = self._matcher.validate_tokens(list(draft_ids))
        self._roll_back(0)
        return num_allowed

    def masks(self, draft_ids: Seq[int]) -> list[TokenMask]:
        """Return the masks after 0, 1, ... and all drafts. Every draft must be allowed."""
        masks, num_read = [self._mask()], 0
        for draft_id in draft_ids:
            num_read += self._advance([draft_id])
            masks.append(self._mask())
        self._roll_back(num_read)
        return masks

    def mask_after(self, draft_ids: Seq[int]) -> TokenMask | None:
        """Return the mask after these drafts; None if one of them is not allowed."""
        if self.num_allowed(draft_ids) < len(draft_ids):
            return None
        num_read = self._advance(draft_ids)
        mask = self._mask()
        self._roll_back(num_read)
        return mask

    def forced_ids(self, draft_ids: Seq[int], max_tokens: int) -> list[int]:
        """Return at most `max_tokens` tokens that must follow allowed drafts, as the tokenizer encodes them.

        The text is certain. Its tokens are not, since the grammar may allow other tokens for the same text.
        """
        if max_tokens <= 0:
            return []
        num_read = self._advance(draft_ids)
        forced_ids = [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()
        self._roll_back(num_read)
        return forced_ids[:max_tokens]

    def _advance(self, draft_ids: Seq[int]) -> int:
        """Consume allowed drafts and return how many to roll back.

        The parser stops where only the end of the text is left. It accepts an end token there without counting it.
        """
        for num_read, draft_id in enumerate(draft_ids):
            if self._matcher.is_stopped():
                return num_read
            self._matcher.consume_token(draft_id)
        return len(draft_ids)

    def _mask(self) -> TokenMask:
        """Return the tokens allowed now; only the end tokens if the parser has failed."""
        return self._matcher.compute_bitmask()

    def _roll_back(self, num_tokens: int) -> None:
        """Roll back drafts. A parser that failed cannot roll back and is rebuilt from the committed tokens."""
        is_back = not self._matcher.is_error() and (num_tokens == 0 or self._matcher.rollback(num_tokens))
        if not is_back and not self.has_failed:
            self._matcher = self._begin()
            self._matcher.consume_tokens(self._read_ids)
