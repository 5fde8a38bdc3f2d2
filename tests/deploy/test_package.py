"""The wheel names everything that its modules import, so that it runs where nothing else is installed."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SHIPPED = ("actors", "cluster", "engine", "models/smollm2", "outrider", "protos", "router", "tuning")
FILES = sorted(file for each in SHIPPED for file in (*(ROOT / each).rglob("*.py"), *ROOT.glob(f"{each}.py")))
# by a function, for an extra
LOADED_WHERE_ASKED_FOR = ("kv_event_publisher.py", "top_view.py", "triton_", "vllm_")
OURS = {"actors", "bench", "cluster", "engine", "models", "outrider", "protos", "router", "tuning"}


def named(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w.-]+", each)[0].lower().replace("_", "-") for each in requirements}


ALWAYS = named(PROJECT["dependencies"])
EXTRAS = named([each for name, extra in PROJECT["optional-dependencies"].items() if name != "dev" for each in extra])
DISTRIBUTIONS = packages_distributions()


def imports(node: ast.AST, is_lazy: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the top-level names of imported modules, and whether a function or a check of types imports them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name.partition(".")[0], is_lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield (child.module or "").partition(".")[0], is_lazy
        is_lazy_below = is_lazy or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.If, ast.Try))
        yield from imports(child, is_lazy_below)


def is_declared(module: str, is_lazy: bool) -> bool:
    if module in OURS or module in sys.stdlib_module_names:
        return True
    allowed = ALWAYS | EXTRAS | {"triton"} if is_lazy else ALWAYS  # Triton comes with torch where there is a GPU
    return any(name.lower().replace("_", "-") in allowed for name in DISTRIBUTIONS.get(module, [module]))


@pytest.mark.parametrize("package", SHIPPED)
def test_every_import_is_of_a_dependency(package: str) -> None:
    files = [file for file in FILES if file.with_suffix("").is_relative_to(ROOT / package)]
    found = {
        (str(file.relative_to(ROOT)), *each)
        for file in files
        for each in imports(ast.parse(file.read_text(encoding="utf-8")), file.name.startswith(LOADED_WHERE_ASKED_FOR))
    }
    assert [each for each in sorted(found) if not is_declared(each[1], each[2])] == []


def test_what_is_shipped_imports_only_what_is_shipped() -> None:
    names = "|".join(package.replace("/", r"\.") for package in SHIPPED)
    ours = re.compile(rf"(?:from|import) ({'|'.join(OURS)})\b")
    shipped = re.compile(rf"(?:from|import) (?:{names})\b")
    lines = [(file, line.strip()) for file in FILES for line in file.read_text(encoding="utf-8").splitlines()]
    assert [each for each in lines if ours.match(each[1]) and not shipped.match(each[1])] == []
