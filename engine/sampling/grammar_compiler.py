"""Compiles the grammars of requests into matchers, with llguidance over the model's tokenizer."""

from __future__ import annotations

import logging
import re
import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from llguidance import LLTokenizer

from engine.sampling.grammar import CompiledGrammar, GrammarMatcher, TokenMask
from engine.sampling.grammar_trial import GrammarTrial, deep_stack, new_tokenizer
from protos.errors import OverloadedError, RateLimitError, RequestError
from protos.messages import MAX_GRAMMAR_CHARACTERS, GenerateRequest, Grammar, GrammarKind, Thought

logger = logging.getLogger(__name__)


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


MAX_SOURCE_BYTES = MAX_GRAMMAR_CHARACTERS
MAX_RULES = 1000  # compile time grows with the square: 0.1 s for so many rules in Lark, 1 s in GBNF
_RULE = re.compile(r'"\$ref"|^[^\S\n]*[?!]?\w', re.MULTILINE)  # a reference in a schema, or a line that defines a rule


# Tenant, salt, kind and source. Tenants share no grammar: timing would reveal whether another has used it.
_Key = tuple[str, str, GrammarKind, str]


class GrammarCompiler:
    """Compiles each grammar once and creates matchers for it. Thread-safe.

    Grammars are compiled one at a time: first in a process that can be killed (`GrammarTrial`), then, if it stays
    within the limits, in a thread here, mostly without Python's lock. Both start with the first grammar. Failures are
    cached too, so sending a bad schema again is cheap.
    """

    def __init__(self, tokenizer_file: Path | None, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """`vocab_size` is the number of logits. Ids that the tokenizer does not have are never allowed."""
        self._tokenizer_file = tokenizer_file
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._trial: GrammarTrial | None = None
        self._compiled: OrderedDict[_Key, Future[CompiledGrammar | str]] = OrderedDict()
        self._pending: list[tuple[Future[CompiledGrammar | str], str]] = []  # (future, tenant)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._lock = threading.Lock()  # never held during compilation

    def prepare(self, request: GenerateRequest) -> Future[CompiledGrammar | str] | None:
        """Start compiling ahead of `matcher` and return at once. `matcher` reports a grammar's errors.

        Returns:
            A future; once it is done, `matcher` does not wait. None if it would not wait now, or there is no grammar.

        Raises:
            OverloadedError: too many grammars wait to be compiled.
            RateLimitError: too many grammars of this tenant wait. Clients without a tenant have the first limit only.
        """
        grammar = request.sampling.grammar
        if grammar is None or _excess(grammar) is not None:
            return None
        compiled = self._compile(grammar, request)
        return None if compiled.done() else compiled

    def matcher(self, request: GenerateRequest) -> GrammarMatcher | None:
        """Return a matcher that has read the request's committed output, or None without a grammar.

        Raises:
            RequestError: the grammar cannot be compiled, contradicts another parameter, or forbids the output so far.
        """
        grammar = request.sampling.grammar
        if grammar is None:
            return None
        self._check(grammar, request)
        compiled = self._compile(grammar, request).result()
        if isinstance(compiled, str):
            raise RequestError(f"{grammar.param} cannot be used: {compiled}", param=grammar.param)
        matcher = self._new(compiled, grammar.thought)
        if not matcher.read(request.output_token_ids):
            raise RequestError(f"{grammar.param} forbids the output generated so far", param=grammar.param)
        return matcher

    def _new(self, compiled: CompiledGrammar, thought: Thought | None) -> GrammarMatcher:
        if thought is None:
            return GrammarMatcher(compiled, self._eos_token_ids)
        return ThoughtfulMatcher(compiled, self._eos_token_ids, thought, 4 * -(-self._vocab_size // 32))

    def _check(self, grammar: Grammar, request: GenerateRequest) -> None:
        sampling = request.sampling
        param = grammar.param
        if (excess := _excess(grammar)) is not None:
            raise RequestError(f"{param} has {excess} are compiled", param=param)
        if sampling.min_tokens > 0:
            raise RequestError(
                f"min_tokens is {sampling.min_tokens}, but {param} decides where the output may end; "
                "leave min_tokens out and put the length into the constraint",
                param="min_tokens",
            )
        if not self._eos_token_ids:
            raise RequestError(
                f"{param} needs an end token to end the output, and the model names none; "
                "set eos_token_id in its generation_config.json",
                param=param,
            )
        if not set(self._eos_token_ids) <= set(sampling.stop_token_ids):
            raise RequestError(
                f"{param} needs the model's end tokens, {list(self._eos_token_ids)}, to end the output; "
                "leave ignore_eos out",
                param="ignore_eos",
            )

    def _compile(self, grammar: Grammar, request: GenerateRequest) -> Future[CompiledGrammar | str]:
        """Return a future of the compiled grammar, or of its error."""
        key = request.tenant, request.cache_salt, grammar.kind, grammar.source
        with self._lock:
            if key not in self._compiled or _is_spoilt(self._compiled[key]):
                self._check_pending(request.tenant)
                self._compiled[key] = self._submit(grammar)
                self._pending.append((self._compiled[key], request.tenant))
            self._compiled.move_to_end(key)
            if len(self._compiled) > 64:
                self._forget_one()
            return self._compiled[key]

    def _forget_one(self) -> None:
        """Evict the least recently used grammar of the tenant with the most cached ones."""
        owners = Counter(tenant for tenant, *_ in self._compiled)
        most = max(owners.values())
        del self._compiled[next(key for key in self._compiled if owners[key[0]] == most)]

    def _check_pending(self, tenant: str) -> None:
        self._pending = [each for each in self._pending if not each[0].done()]
        num_pending = len(self._pending)
        most, most_own = 16, 4  # a compilation takes seconds at most; one tenant cannot take all places
        if num_pending >= most:
            raise OverloadedError(
                f"{num_pending} grammars wait to be compiled, and at most {most} may; send it again later",
                retry_after_s=most / 4,
            )
        num_own = sum(owner == tenant for _, owner in self._pending)
        if tenant and num_own >= most_own:
            raise RateLimitError(
                f"{num_own} grammars of this key's tenant wait to be compiled, and at most {most_own} may; "
                "send it again later"
            )

    def _submit(self, grammar: Grammar) -> Future[CompiledGrammar | str]:
        """Compile in the pool's thread, which has a deep stack."""
        with deep_stack():
            return self._pool.submit(self._new_matcher, grammar)  # the first call starts the thread

    def _new_matcher(self, grammar: Grammar) -> CompiledGrammar | str:
        try:
            if self._tokenizer_file is None:
                raise ValueError("the model has no tokenizer.json, so the bytes of its tokens are unknown")
            if self._trial is None:
                self._trial = GrammarTrial(self._tokenizer_file, self._vocab_size, self._eos_token_ids)
            source = self._trial.source(grammar.kind, grammar.source)
            if self._tokenizer is None:
                self._tokenizer = new_tokenizer(self._tokenizer_file, self._vocab_size, self._eos_token_ids)
            return CompiledGrammar(self._tokenizer, source)
        except ValueError as error:  # the library cannot read the grammar or the tokenizer
            return str(error)
        except BaseException as error:  # a panic of the library must fail this request only
            kind = type(error).__name__  # its message may quote the grammar
            logger.error("a grammar of %d characters could not be compiled: %s", len(grammar.source), kind)
            return f"its compiler failed: {error}"


def _is_spoilt(compiled: Future[CompiledGrammar | str]) -> bool:
    """True if no new sequence can use the grammar, so that it must be compiled again."""
    grammar = compiled.result() if compiled.done() else ""
    return not isinstance(grammar, str) and grammar.is_spoilt


def _excess(grammar: Grammar) -> str | None:
    """Return the size that is over its limit, with the limit; None if the grammar is small enough to compile."""
    if len(grammar.source) > MAX_SOURCE_BYTES:
        return f"{len(grammar.source)} characters; at most {MAX_SOURCE_BYTES}"
    if grammar.kind not in (GrammarKind.JSON_SCHEMA, GrammarKind.GRAMMAR):
        return None
    num_rules = len(_RULE.findall(grammar.source))
    return f"{num_rules} rules or references; at most {MAX_RULES}" if num_rules > MAX_RULES else None
