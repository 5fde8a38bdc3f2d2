"""Compiles each grammar first in a separate process, so that a costly grammar ends that process and not the engine.

Few characters can be costly: a JSON schema of fourteen patterns that all must match takes twelve seconds, one of
sixteen takes minutes, in a call that cannot be interrupted. `GrammarTrial` runs this file as a program, so it imports
no other module of the project.
"""

from __future__ import annotations

import json
import random
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from

MAX_COMPILE_S = 2  # of processor time
MAX_COMPILE_BYTES = 256 << 20
_CLOSING = ('"', ",", "}", "]", '",', '"}', "},", "],")  # tokens that lead a walk to the next key or to the end
_DEAD_ENDS = ("NoExtension", "ff_tokens")  # in errors: no token can follow; the forced tokens have no end
# In errors: a mask took more work, or more states, than the limits allow.
LEXER_FAILED = "lexer error"
_MASK_ITEMS = 5_000  # parser items for one mask: 10 to 40 ms (the library's 50,000: 0.2 s)
_NO_TEXT = "NoExtensionBias"  # the library's error of a mask without a token


def limits() -> LLParserLimits:
    """Return limits in counts, not in time, so that a grammar fails at the same token on every machine."""
    # The first mask takes 0.09 s, the next 9 ms (the library's 1,000,000: 1.7 s, 0.15 s).
    return LLParserLimits(initial_lexer_fuel=100_000, step_max_items=_MASK_ITEMS, verbose_errors=False)


def new_tokenizer(file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Read a tokenizer. Raises ValueError if the library cannot read it."""
    return LLTokenizer(file.read_text(encoding="utf-8"), n_vocab=vocab_size, eos_token=list(eos_token_ids))


def new_matcher(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    """Compile a grammar in the library's form, including its first mask, and return the matcher to copy.

    Raises:
        ValueError: the grammar has an error.
    """
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits())
    if matcher.is_error():
        raise ValueError(matcher.get_error().strip())
    matcher.compute_bitmask()  # a grammar that matches nothing, or recurses without end, fails only here
    if matcher.is_error():
        reason = matcher.get_error().partition("\n")[0]
        raise ValueError("no text matches it" if reason == _NO_TEXT else f"it is too complex: {reason}")
    return matcher


class GrammarTrial:
    """Tries one grammar at a time, for one thread. The process starts with the first grammar, and after each kill."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        numbers = map(str, (vocab_size, *eos_token_ids))
        self._command = [sys.executable, "-P", __file__, str(tokenizer_file), *numbers]
        self._process: subprocess.Popen[str] | None = None

    def source(self, kind: str, text: str) -> str:
        """Return a grammar in the library's form if it compiles within the limits.

        Raises:
            ValueError: the grammar has an error or exceeds the limits.
        """
        process = self._running()
        try:
            with _killed_after(process, 60.0):  # for an answer on a busy machine, including the start of the process
                answer = _request(process, {"kind": kind, "text": text})
        except (OSError, ValueError):  # the process ended or was killed
            self.close()
            raise ValueError(
                f"it takes more than {MAX_COMPILE_S} s or {MAX_COMPILE_BYTES >> 20} MiB to compile"
            ) from None
        if "error" in answer:
            raise ValueError(answer["error"])
        source: str = answer["source"]
        return source

    def close(self) -> None:
        """Kill the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def __del__(self) -> None:
        self.close()

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            # Its own process group: Ctrl-C in the terminal is for the server, which closes it.
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
            )
        return self._process


@contextmanager
def _killed_after(process: subprocess.Popen[str], seconds: float) -> Iterator[None]:
    timer = threading.Timer(seconds, process.kill)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _request(process: subprocess.Popen[str], question: dict[str, str]) -> dict[str, str]:
    """Return the process's answer. Raises OSError or ValueError if it gives no answer."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(question) + "\n")
    process.stdin.flush()
    answer: dict[str, str] = json.loads(process.stdout.readline())
    return answer


def _answer_all(tokenizer_file: str, vocab_size: str, *eos_token_ids: str) -> None:
    """Answer line by line, in the process, until the engine closes the pipe."""
    tokenizer: LLTokenizer | str
    try:
        tokenizer = new_tokenizer(Path(tokenizer_file), int(vocab_size), [int(each) for each in eos_token_ids])
    except ValueError as error:
        tokenizer = str(error)
    for line in sys.stdin:
        _limit_process()
        answer = {"error": tokenizer} if isinstance(tokenizer, str) else _answer(tokenizer, **json.loads(line))
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _answer(tokenizer: LLTokenizer, kind: str, text: str) -> dict[str, str]:
    try:
        source = _library_source(kind, text)
        _walk(new_matcher(tokenizer, source), tokenizer)
    except ValueError as error:
        return {"error": str(error)}
    except BaseException as error:  # a panic of the library
        return {"error": f"its compiler failed: {error}"}
    return {"source": source}


def _walk(matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
    """Generate a few random beginnings of texts and check that each can be continued or end.

    The library does not check that rules can end: it may allow a comma where no key can follow, or require a list in a
    list without end.

    Raises:
        ValueError: a text cannot be completed.
    """
    until_s = time.thread_time() + 0.02  # for 16 texts of up to 24 tokens
    dice = random.Random(0)
    closing = {token_id for mark in _CLOSING for token_id in tokenizer.tokenize_str(mark)[:1]}
    for _ in range(16):
        walker, written = matcher.deep_copy(), list[int]()
        while len(written) < 24 and not walker.is_stopped():
            if time.thread_time() > until_s:
                return
            allowed = _allowed(walker)
            if walker.is_error():
                break
            preferred = [token_id for token_id in closing if token_id in allowed]
            # Prefer closing tokens, to reach the ends of rules within a few tokens.
            written.append(dice.choice(preferred if preferred and dice.random() < 0.6 else allowed))
            walker.consume_token(written[-1])
        if walker.is_error() and len(written) == 1 and LEXER_FAILED in walker.get_error():
            raise ValueError("it is too complex: no token of a text can be read within the parser's limits")
        if walker.is_error() and any(sign in walker.get_error() for sign in _DEAD_ENDS):
            text = tokenizer.decode_str(written)[-80:]  # characters
            raise ValueError(f"a text that begins with {json.dumps(text, ensure_ascii=False)} cannot be completed")


def _allowed(matcher: LLMatcher) -> list[int]:
    mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return [int(each) for each in np.flatnonzero(np.unpackbits(mask, bitorder="little"))]


def _library_source(kind: str, text: str) -> str:
    """Return the grammar in the library's form. Raises ValueError if it cannot be converted."""
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text)
    if kind == "choice":
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(each) for each in json.loads(text)))
    return grammar_from("regex" if kind == "regex" else "grammar", text)


def _limit_process() -> None:
    """Set the system's limits on further processor time and memory of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + MAX_COMPILE_S)
    pages = Path("/proc/self/statm")
    if pages.exists():
        num_bytes = int(pages.read_text().split()[0]) * resource.getpagesize()
        _limit(resource.RLIMIT_AS, num_bytes + MAX_COMPILE_BYTES)


def _limit(kind: int, amount: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))


@contextmanager
def deep_stack() -> Iterator[None]:
    """Give threads that start in this block a deep stack: the library recurses, and an overflow ends the process.

    1,000 nested rules overflow a thread's usual 8 MiB.
    """
    usual_bytes = threading.stack_size(512 << 20)
    try:
        yield
    finally:
        threading.stack_size(usual_bytes)


def in_deep_thread(target: Callable[[], None]) -> threading.Thread:
    """Start a thread with a deep stack."""
    thread = threading.Thread(target=target)
    with deep_stack():
        thread.start()
    return thread


if __name__ == "__main__":
    in_deep_thread(lambda: _answer_all(*sys.argv[1:])).join()
