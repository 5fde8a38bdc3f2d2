"""A test that does not run has a reason, which `make test` prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parents[1]
MARK = re.compile(r"\.(?:skip|skipif|importorskip|xfail)\(")
WITH_REASON = {"skipif", "importorskip", "xfail"}


def calls() -> Iterator[tuple[str, ast.Call]]:
    """Yield the call of each mark and function that leaves out a test, with its place."""
    for file in FOLDER.rglob("test_*.py"):
        text = file.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if MARK.search(text) else ():
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = node.func.attr
                if name in WITH_REASON or (name == "skip" and ast.unparse(node.func).startswith("pytest.")):
                    yield f"{file.relative_to(FOLDER)}:{node.lineno}", node


def test_each_test_that_may_be_left_out_has_a_reason() -> None:
    found = dict(calls())
    assert len(found) > 30
    silent = {
        place
        for place, call in found.items()
        if not any(keyword.arg == "reason" for keyword in call.keywords)
        and not (ast.unparse(call.func).endswith(".skip") and call.args)
    }
    assert silent == set()
