"""Tracks the tokens that a grammar allows next in one sequence. `engine.sampling.grammar_compiler` compiles grammars.

The parser is llguidance's. It advances over committed tokens; drafts are read and rolled back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence as Seq
from functools import partial

from llguidance import LLMatcher, LLTokenizer

from engine.sampling.grammar_trial import LEXER_FAILED, in_deep_thread, new_matcher
from protos.client_text import for_log

logger = logging.getLogger(__name__)

TokenMask = bytes  # one bit per token id, set if the token is allowed; token 0 is the lowest bit of the first byte
DEAR_MASK_S = 0.002  # of processor time; most masks take a hundredth


class CompiledGrammar:
    """A compiled grammar for the sequences that use it. Only the engine's thread uses it once it is made.

    Its parsers share a lexer, which keeps the states that it has computed. A lexer that exceeds its limits has failed
    for all of them and for good. Then the grammar is compiled again, so that the others go on.

    Attributes:
        mask_s: processor time of a mask, the dearest of the last few.
        generation: the number of shared lexers before this one.
        again_s: processor time to compile it again, and of dear masks by those lexers.
        is_spoilt: its lexer has failed, so that new sequences need another one.
    """

    def __init__(self, tokenizer: LLTokenizer, source: str) -> None:
        """Compile `source`, a grammar in the library's form. Raises ValueError if it has an error."""
        self.generation, self.again_s, self.is_spoilt = 0, 0.0, False
        self._compile = partial(new_matcher, tokenizer, source)
        began_s = _clock_s()
        self._parser = self._compile()
        compiled_s = _clock_s()
        self._compile_s = compiled_s - began_s
        self.begin().compute_bitmask()  # the first mask again, with the lexer's states at hand
        self.mask_s = _clock_s() - compiled_s

    def begin(self) -> LLMatcher:
        """Return a parser at the start of the grammar."""
        return self._parser.deep_copy()

    def begin_again(self) -> LLMatcher | None:
        """Return a parser whose shared lexer has not failed; None if compiling again would take too long."""
        if self.is_spoilt:
            parser = self.begin_alone()
            if parser is None:
                return None
            self._parser, self.generation, self.is_spoilt = parser, self.generation + 1, False
        return self.begin()

    def begin_alone(self) -> LLMatcher | None:
        """Return a parser with a lexer of its own; None if compiling again would take too long."""
        made: list[LLMatcher] = []
        # Seconds of processor time; then no text of a grammar gets another lexer.
        if self.again_s + self._compile_s < 0.5:
            self.again_s += self._compile_s
            in_deep_thread(lambda: made.append(self._compile())).join()
        return made[0] if made else None


def _clock_s() -> float:
    """Return this thread's processor time, so that other work on the machine does not count."""
    return time.thread_time()


class GrammarMatcher:
    """The state of one sequence's grammar after its committed output.

    The sequence owns it, and only the engine's thread uses it. Between two calls, the parser has consumed exactly the
    tokens passed to `read`. End tokens are allowed exactly where the grammar accepts.

    Attributes:
        grammar: the compiled grammar, shared with other sequences.
        has_failed: the committed output is incomplete, and no token can follow it.
    """

    def __init__(self, grammar: CompiledGrammar, end_ids: Seq[int]) -> None:
        """`end_ids` are the end tokens."""
        self.has_failed = False
        self.grammar = grammar
        self._mask_s = 0.0  # processor time of the last mask
        self._matcher, self._generation = grammar.begin(), grammar.generation
        self._dearest_s = 0.0  # processor time of a mask
        self._is_alone = False  # no other sequence shares our lexer
        self._tried_drafts_at = -1  # the number of committed tokens when drafts last met a failed lexer
        self._end_ids = frozenset(end_ids)
        self._read_ids: list[int] = []
        self._next_mask: TokenMask | None = None  # after the committed tokens, once it is known

    def read(self, token_ids: Seq[int]) -> bool:
        """Consume committed tokens. Returns False if the grammar forbids one of them or its parser failed."""
        for token_id in token_ids:
            is_end = token_id in self._end_ids
            is_right = self._read_one(token_id) or (self._heal(drafted=False) and self._read_one(token_id))
            if not is_right and not self.has_failed:
                self.has_failed = True
                logger.warning("a grammar ended its sequence early: %s", for_log(self._matcher.get_error()))
            if not is_end:
                self._read_ids.append(token_id)
            self._next_mask = None
        return not self.has_failed

    def prepare(self) -> float:
        """Compute the mask after the committed tokens, and keep it for `masks`. Returns the time that this took."""
        self._mask_s, again_s = 0.0, self.grammar.again_s
        self.masks(())
        return self._mask_s + self.grammar.again_s - again_s

    def num_allowed(self, draft_ids: Seq[int]) -> int:
        """Count the leading drafts that the grammar allows next. All ids must be in the vocabulary."""
        if not draft_ids:
            return 0
        if self._matcher.is_stopped():  # a stopped parser validates no token, although its mask has the end tokens
            return int(draft_ids[0] in self._end_ids)
        num_allowed = self._matcher.validate_tokens(list(draft_ids))
        return GrammarMatcher.num_allowed(self, draft_ids) if self._roll_back(0, drafted=True) else num_allowed

    def masks(self, draft_ids: Seq[int]) -> list[TokenMask]:
        """Return the masks after 0, 1, ... and all drafts. Every draft must be allowed."""
        if self._next_mask is None:
            self._next_mask = self._mask()
        masks, num_read = [self._next_mask], 0
        for draft_id in draft_ids:
            num_read += self._advance([draft_id])
            masks.append(self._mask())
        is_void = self._roll_back(num_read, drafted=bool(draft_ids))
        return GrammarMatcher.masks(self, draft_ids) if is_void else masks

    def mask_after(self, draft_ids: Seq[int]) -> TokenMask | None:
        """Return the mask after these drafts; None if one of them is not allowed."""
        if not draft_ids:
            return GrammarMatcher.masks(self, ())[0]
        if self.num_allowed(draft_ids) < len(draft_ids):
            return None
        num_read = self._advance(draft_ids)
        mask = self._mask()
        return GrammarMatcher.mask_after(self, draft_ids) if self._roll_back(num_read, drafted=True) else mask

    def forced_ids(self, draft_ids: Seq[int], max_tokens: int) -> list[int]:
        """Return at most `max_tokens` tokens that must follow allowed drafts, as the tokenizer encodes them.

        The text is certain. Its tokens are not, since the grammar may allow other tokens for the same text.
        """
        if max_tokens <= 0:
            return []
        num_read = self._advance(draft_ids)
        forced_ids = [] if self._matcher.is_stopped() else self._matcher.compute_ff_tokens()
        self._roll_back(num_read, drafted=True)
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

    def _read_one(self, token_id: int) -> bool:
        return self._matcher.is_accepting() if token_id in self._end_ids else self._matcher.consume_token(token_id)

    def _mask(self) -> TokenMask:
        """Return the tokens allowed now; only the end tokens if the parser has failed."""
        began_s = _clock_s()
        mask = self._matcher.compute_bitmask()
        self._note(_clock_s() - began_s)
        return mask

    def _note(self, mask_s: float) -> None:
        self._mask_s, self._dearest_s = mask_s, max(mask_s, self._dearest_s)
        self.grammar.mask_s = max(mask_s, self.grammar.mask_s / 2)
        if mask_s > DEAR_MASK_S and (self._is_alone or self.grammar.generation > 0):
            self.grammar.again_s += mask_s

    def _roll_back(self, num_tokens: int, *, drafted: bool) -> bool:
        """Roll back drafts. A parser that failed cannot roll back and is rebuilt from the committed tokens.

        Returns:
            True if the lexer had failed, perhaps for another sequence: then compute again.
        """
        if not self._matcher.is_error() and (num_tokens == 0 or self._matcher.rollback(num_tokens)):
            return False
        if self.has_failed:
            return False
        if LEXER_FAILED in self._matcher.get_error():
            return self._heal(drafted=drafted)
        self._restart(self.grammar.begin())
        return False

    def _heal(self, *, drafted: bool) -> bool:
        """Go on with another lexer if ours has failed. True if a second try may have another result.

        The sequence with dear masks is the likely cause: it gets a lexer of its own, the others a new shared one.
        """
        if LEXER_FAILED not in self._matcher.get_error():
            return False
        grammar, num_read = self.grammar, len(self._read_ids)
        grammar.is_spoilt |= not self._is_alone and self._generation == grammar.generation
        if self._is_alone and not drafted:  # the text itself is too hard
            return False
        is_tried = self._is_alone or (drafted and self._tried_drafts_at == num_read)
        self._tried_drafts_at = num_read if drafted else -1
        self._is_alone |= self._dearest_s > DEAR_MASK_S
        parser = grammar.begin_alone() if self._is_alone else grammar.begin_again()
        if parser is None:
            return False
        self._restart(parser)
        return not is_tried

    def _restart(self, parser: LLMatcher) -> None:
        self._matcher, self._generation, self._next_mask = parser, self.grammar.generation, None
        parser.consume_tokens(self._read_ids)
