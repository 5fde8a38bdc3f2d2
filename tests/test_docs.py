"""Every path, module and link of the documentation exists, and its prose wraps at 120 columns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.schema.frontends import RouterSection

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
PACKAGES = "actors|bench|cluster|engine|models|protos|router|tests"

CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(rf"(?:{PACKAGES}|docs|\.ci)(?:/[\w.-]+)*/?")
MODULE = re.compile(rf"(?:{PACKAGES})(?:\.\w+)+")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
MAX_COLUMNS = 120


def prose(page: Path) -> list[str]:
    """Return the lines of a page outside fenced code and tables."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return [line for line in text.splitlines() if not line.lstrip().startswith("|")]


def is_module(name: str) -> bool:
    """True if a dotted name is a file, a module, an attribute of one, or a key of `router` in deploy.yaml."""
    parts = name.split(".")
    if (ROOT / name).is_file() or (parts[0] == "router" and parts[1] in RouterSection.model_fields):
        return True
    return any(
        (ROOT.joinpath(*parts[:end]).with_suffix(".py")).is_file() or (end > 1 and ROOT.joinpath(*parts[:end]).is_dir())
        for end in (len(parts), len(parts) - 1, len(parts) - 2)
        if end > 0
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_and_modules_in_backticks_exist(page: Path) -> None:
    spans = CODE.findall(re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL))
    missing = [span for span in spans if PATH.fullmatch(span) and "/" in span and not (ROOT / span).exists()]
    missing += [
        span for span in spans if MODULE.fullmatch(span) and not (ROOT / span).is_file() and not is_module(span)
    ]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    targets = LINK.findall(page.read_text(encoding="utf-8"))
    assert not [target for target in targets if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_prose_wraps_at_120_columns(page: Path) -> None:
    long = [line for line in prose(page) if len(line) > MAX_COLUMNS and not line.startswith("![")]
    assert not long
