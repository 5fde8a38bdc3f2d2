"""The Python standard library as a corpus: training files, held-out files, and chat documents made from them.

This module is independent of tokens and models.
"""

import ast
import hashlib
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class ChatExample:
    """A request for one function, and the function: the demo pair's only kind of chat."""

    messages: list[dict[str, str]]


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


def chat_examples(document: Document) -> Iterator[ChatExample]:
    """Return one example per documented function; the request is the first line of its docstring."""
    try:
        tree = ast.parse(document.text)
    except (SyntaxError, ValueError):
        return
    lines = document.text.split("\n")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (example := _chat_example(lines, node)):
            yield example


def _chat_example(lines: list[str], node: ast.FunctionDef) -> ChatExample | None:
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
    return ChatExample(messages)
