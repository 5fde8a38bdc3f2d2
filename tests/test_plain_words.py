"""Prose is plain: docstrings, comments, messages and pages avoid the constructs that readers have to decode.

Each construct has a plainer form, which the failure names. A quotation or a name in backticks may use any word.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# The construct, and what to write in its place. A space matches line breaks too.
CONSTRUCTS = {
    r"of which": "start a new sentence",
    r"what of": "name the thing",
    r"(?:of|for) whom": "start a new sentence",
    r"(?:by|in|on|to|from|with|behind|at|for|into|over|through|after|before) which": "start a new sentence",
    r"that of": "repeat the noun",
    r"those of": "repeat the noun",
    r"none of(?! (?:it|them|these|those|its|our|the))": "not, no",
    r"(?:is|are|was|were|be) none": "does not exist, has no",
    r"(?<!step\s)behind(?! (?:HAProxy|an? (?:proxy|load balancer|flag)))": "after, in, below",
    r"besides?": "next to, with, and",
    r"tell|tells|told|telling": "report, send, pass",
    r"say|says|said|saying": "report, state, name",
    r"judg(?:e|es|ed|ing)": "verify, check",
    r"guess(?:es|ed|ing)?": "draft",
    r"anew": "again",
    r"likewise": "too, the same",
    r"whichever": "the",
    r"but for": "except",
    r"(?<![.?!|\[]\s)(?<!\[)(?<!^)what (?:is|are|was|it|they|this|a|the|we)": "name the thing",
    r"stands?|stood|standing": "is, remains",
    r"lay|lain|lies": "is stored",
    r"brings?|brought": "returns, gives, costs",
    r"the ones? (?:that|of|before|which)": "name the thing",
    r"borne?|bears?": "takes, tolerates",
    r"(?:is|are) asked": "name who calls what",
    r"(?<!->\s)(?<!\|\s)None:(?= )": "a clause: None if ...",  # "keys: None: no key has one"
}
_REMEDIES = tuple(CONSTRUCTS.values())
_CONSTRUCT = re.compile(
    r"(?<![\w-])(?:" + "|".join(f"({construct})" for construct in CONSTRUCTS).replace(" ", r"\s+") + r")(?![\w-])"
)
_PYTHON = re.compile(
    r"(?P<comment>#[^\n]*)"
    r"|[rRbBfFuU]{0,2}(?:"
    r'"""(?P<long>(?:\\.|[^\\])*?)"""'
    r"|'''(?P<other_long>(?:\\.|[^\\])*?)'''"
    r'|"(?P<short>(?:\\.|[^"\\\n])*)"'
    r"|'(?P<other_short>(?:\\.|[^'\\\n])*)')",
    re.DOTALL,
)
_C_COMMENT = re.compile(r"//[^\n]*(?:\n[ \t]*//[^\n]*)*|/\*.*?\*/", re.DOTALL)
_MARGIN = re.compile(r"\n[ \t]*(?:#|//|\*(?=\s))[ \t]*")  # a line break in a comment, and the next line's mark
_CODE = re.compile(r"\{[{%].*?[%}]\}|```.*?```|`[^`]*`", re.DOTALL)
_QUOTED = re.compile(r"\"[^\"\n]*\"")
_SENTENCE_WORDS = 4  # a string of fewer words is a name or a format

ROOMS = ("actors", "bench", "cluster", "deploy", "docs", "engine", "models", "outrider", "protos", "router", "tests")
SUFFIXES = (".py", ".c", ".h", ".proto", ".md")
SKIPPED = ("tests/test_plain_words.py", "_pb2", "tests/router/generation/templates", "recorded")


def _python_texts(source: str) -> Iterator[tuple[int, str]]:
    """Yield adjacent literals as one text, and adjacent lines of comments as one text."""
    start = end = 0
    pieces: list[str] = []
    last = ""
    for found in _PYTHON.finditer(source):
        kind = "comment" if found.lastgroup == "comment" else "string"
        gap = source[end : found.start()]
        if kind == last and not gap.strip():
            pieces.append("\n" * gap.count("\n"))
        else:
            yield start, "".join(pieces)
            start, pieces = found.start(), []
        pieces.append(found[found.lastgroup or 0])
        end, last = found.end(), kind
    yield start, "".join(pieces)


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each piece of prose in a file."""
    source = path.read_text(encoding="utf-8")
    pieces: Iterator[tuple[int, str]]
    if path.suffix == ".py":
        pieces = ((at, text) for at, text in _python_texts(source) if len(text.split()) >= _SENTENCE_WORDS)
    elif path.suffix in (".c", ".h"):
        pieces = ((found.start(), found.group()) for found in _C_COMMENT.finditer(source))
    else:
        pieces = iter([(0, source)])
    yield from ((source.count("\n", 0, at) + 1, text) for at, text in pieces)


def constructs_in(path: Path) -> list[str]:
    """Return a line for each construct in a file: where it is, the words, and the plainer form."""
    found = []
    for line, text in _texts(path):
        prose = _MARGIN.sub("\n", text)
        prose = _CODE.sub(lambda match: "\n" * match.group().count("\n") + "_", prose)
        prose = _QUOTED.sub("_", prose)
        for match in _CONSTRUCT.finditer(prose):
            number = line + prose.count("\n", 0, match.start())
            words, remedy = " ".join(match.group().split()), _REMEDIES[(match.lastindex or 1) - 1]
            found.append(f"{path.relative_to(ROOT)}:{number}: {words!r}; write: {remedy}")
    return found


@cache
def constructs() -> dict[str, list[str]]:
    """Return the constructs of every file, by its folder."""
    files = [*ROOT.glob("*.md"), *(path for room in ROOMS for path in (ROOT / room).rglob("*"))]
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(files):
        if path.suffix in SUFFIXES and not any(part in str(path.relative_to(ROOT)) for part in SKIPPED):
            found[str(path.relative_to(ROOT).parent)] += constructs_in(path)
    return found


@pytest.mark.parametrize("room", [".", *ROOMS])
def test_prose_avoids_constructs_that_readers_have_to_decode(room: str) -> None:
    found = [line for folder, lines in constructs().items() for line in lines if folder.split("/")[0] == room]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("a.py", '"""The row of which the key is read."""'),
        ("a.py", 'raise ValueError("the row of "\n    "which the key is read")'),
        ("a.py", "x = 1  # the row that of\n# the others, and of\n# which the key is read"),
        ("a.py", 'keys: str  # None: no key has one\n"""keys: None: no key has one."""'),
        ("a.h", "// the row of\n// which the key is read"),
        ("a.proto", "string key = 1;  // what is read of a row"),
        ("a.c", "/* the row of\n * which the key is read */"),
    ],
)
def test_a_construct_is_found(name: str, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    page = tmp_path / name
    page.write_text(source)
    assert constructs_in(page)


def test_a_quotation_and_a_name_in_backticks_may_use_any_word(tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text('"""Return `guess`, or a "what is it" as it came."""\nwhat = "is"\n')
    assert not constructs_in(page)
