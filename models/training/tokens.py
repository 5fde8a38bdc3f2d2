"""Training data: the Python standard library as a corpus, the tokens of an epoch, and windows of them."""

import ast
import hashlib
import itertools
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from models.training.architecture import END_OF_TEXT, MAX_CONTEXT_TOKENS, REPETITION_PENALTY, render_chat
from tuning.score import generate

# Tables, generated text and deliberately broken files: many bytes, little Python.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "encoded_modules", "data"}
)
SKIPPED_PREFIXES = ("_sysconfigdata", "bad_", "badsyntax_")
TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
SYSTEM_PROMPT = "You write Python."


@dataclass(frozen=True, slots=True)
class Document:
    """One source file. `name` is its path below the library root, with forward slashes."""

    name: str
    text: str

    @property
    def is_test(self) -> bool:
        """True for the library's own test suite."""
        return not TEST_FOLDERS.isdisjoint(self.name.split("/"))

    @property
    def is_held_out(self) -> bool:
        """True if the file is held out; a digest of its name decides, so the split is the same in every run."""
        digest = hashlib.sha256(self.name.encode()).digest()
        return int.from_bytes(digest[:4], "big") % 100 < 3


@dataclass(frozen=True, slots=True)
class Corpus:
    """The training files and the held-out files; no file is in both."""

    training: list[Document]
    held_out: list[Document]


def library_root() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def is_skipped(relative: Path) -> bool:
    """True if the corpus leaves out this path below the root."""
    return not SKIPPED_FOLDERS.isdisjoint(relative.parts) or relative.name.startswith(SKIPPED_PREFIXES)


def read_documents(root: Path) -> Iterator[Document]:
    """Return the usable source files below `root`, ordered by name: UTF-8, and not too large."""
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if is_skipped(relative) or not 0 < path.stat().st_size <= 250_000:
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        yield Document(relative.as_posix(), text.expandtabs(8))


def collect(root: Path | None = None) -> Corpus:
    """Read the corpus and split it by file."""
    documents = list(read_documents(root or library_root()))
    return Corpus(
        training=[document for document in documents if not document.is_held_out],
        held_out=[document for document in documents if document.is_held_out],
    )


def chat_examples(document: Document) -> Iterator[list[dict[str, str]]]:
    """Yield a chat per documented function: a request, the first line of its docstring, and the function."""
    try:
        tree = ast.parse(document.text)
    except (SyntaxError, ValueError):
        return
    lines = document.text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (example := _chat_example(lines, node)):
            yield example


def _chat_example(lines: list[str], node: ast.FunctionDef) -> list[dict[str, str]] | None:
    summary = (ast.get_docstring(node) or "").strip().split("\n")[0]
    source = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    if not summary or len(source) > 2_500:
        return None
    request = f"Write a Python function `{node.name}`. {summary}"
    messages = [
        {"role": "user", "content": request},
        {"role": "assistant", "content": textwrap.dedent(source).strip() + "\n"},
    ]
    if random.Random(request).random() < 0.5:
        messages.insert(0, {"role": "system", "content": SYSTEM_PROMPT})
    return messages


@dataclass(frozen=True, slots=True)
class TokenizedCorpus:
    """Token ids per document, each ending in end-of-text."""

    library: list[np.ndarray]
    tests: list[np.ndarray]
    chats: list[np.ndarray]

    def epoch(self, rng: np.random.Generator) -> np.ndarray:
        """Return one shuffled stream: the library, its chats and a random part of the test suite."""
        chosen = rng.permutation(len(self.tests))[: int(len(self.tests) * 0.15)]
        documents = self.library + self.chats + [self.tests[index] for index in chosen]
        return np.concatenate([documents[index] for index in rng.permutation(len(documents))])


def encode(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Return the ids of each text, closed by end-of-text."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return [np.array([*encoding.ids, end], dtype=np.int64) for encoding in tokenizer.encode_batch(texts)]


def tokenize_corpus(tokenizer: Tokenizer, corpus: Corpus) -> TokenizedCorpus:
    """Return the training half of the corpus as ids."""
    library = [document for document in corpus.training if not document.is_test]
    chats = [render_chat(messages) for document in library for messages in chat_examples(document)]
    tests = [document for document in corpus.training if document.is_test]
    return TokenizedCorpus(
        library=encode(tokenizer, _texts(library)),
        tests=encode(tokenizer, _texts(tests)),
        chats=encode(tokenizer, chats),
    )


def _texts(documents: list[Document]) -> list[str]:
    return [document.text for document in documents]


class WindowStream:
    """An endless supply of windows, drawn in random order from one epoch after the other.

    The random order matters: neighbouring windows come from one file, so a batch of them teaches little more than one.
    """

    def __init__(self, corpus: TokenizedCorpus, seed: int) -> None:
        self._corpus = corpus
        self._rng = np.random.default_rng(seed)
        self._stream = np.empty(0, dtype=np.int64)
        self._starts: list[int] = []
        self._num_tokens = 0

    def windows(self, num_windows: int, num_tokens: int) -> Tensor:
        """Return the next windows [B, T + 1]; a new length starts a new epoch."""
        return torch.from_numpy(np.stack([self._next(num_tokens) for _ in range(num_windows)]))

    def _next(self, num_tokens: int) -> np.ndarray:
        if not self._starts or num_tokens != self._num_tokens:
            self._begin_epoch(num_tokens)
        start = self._starts.pop()
        return self._stream[start : start + num_tokens + 1]

    def _begin_epoch(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._stream = self._corpus.epoch(self._rng)
        starts = np.arange(0, len(self._stream) - num_tokens, num_tokens)
        self._starts = self._rng.permutation(starts).tolist()


def skipped_positions(num_windows: int, num_tokens: int, generator: torch.Generator) -> Tensor:
    """Positions [B, T] that jump once at a random place, so short windows teach distances up to the whole context.

    Positional skip-wise training (arXiv:2309.10400). Every second window keeps plain positions.
    """
    positions = torch.arange(num_tokens).repeat(num_windows, 1)
    split = torch.randint(1, num_tokens, (num_windows, 1), generator=generator)
    skip = torch.randint(0, MAX_CONTEXT_TOKENS - num_tokens, (num_windows, 1), generator=generator)
    skip[::2] = 0
    return positions + skip * (positions >= split)


def plain_positions(num_windows: int, num_tokens: int) -> Tensor:
    """Positions [B, T] that count from zero."""
    return torch.arange(num_tokens).repeat(num_windows, 1)


def measuring_windows(documents: list[np.ndarray], num_tokens: int = 1024) -> Iterator[Tensor]:
    """Windows [1, up to T + 1] of each document, tails included; each starts where the last ended."""
    for ids in documents:
        for start in range(0, len(ids) - 1, num_tokens):
            yield torch.from_numpy(ids[start : start + num_tokens + 1]).unsqueeze(0)


def mixed_batches(
    stream: WindowStream, rollouts: Tensor, every_batches: int, num_windows: int, num_tokens: int, seed: int
) -> Iterator[Tensor]:
    """Yield windows [B, T + 1] without end: of the corpus, and once in `every_batches` of `rollouts`, at random."""
    rng = np.random.default_rng(seed)
    for number in itertools.count(1):
        if number % every_batches:
            yield stream.windows(num_windows, num_tokens)
        else:
            yield rollouts[rng.integers(0, len(rollouts), num_windows)][:, : num_tokens + 1]


def write_rollouts(
    target: LlamaForCausalLM, stream: WindowStream, num_windows: int, num_prompt_tokens: int, num_tokens: int, seed: int
) -> Tensor:
    """Return windows [N, num_tokens + 1] of the stream's text with the target's continuations, on the CPU.

    Half are greedy, half at temperature 1, with the served repetition penalty.
    """
    written = []
    for temperature in (0.0, 1.0):
        prompts = stream.windows(num_windows // 2, num_prompt_tokens)[:, 1:].to(target.device)
        num_new = num_tokens + 1 - num_prompt_tokens
        written.append(generate(target, prompts, num_new, temperature, seed, REPETITION_PENALTY))
    return torch.cat(written).cpu()
