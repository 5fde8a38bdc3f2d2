"""Every path, module and link of the documentation exists, and its prose wraps at 120 columns."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cluster.schema.replicas import RouterSection

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
CODE_FOLDERS = ("actors", "bench", "cluster", "engine", "models", "protos", "router")
SOURCES = [
    *(f"{folder}/**/*.{ending}" for folder in CODE_FOLDERS for ending in ("py", "sh")),
    *("deploy/**/*.sh", "deploy/**/*.yaml", "deploy/**/*.Dockerfile", "deploy.yaml", "Makefile", "pyproject.toml"),
]
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


def mentions() -> list[tuple[str, str]]:
    """Return the files that name a page of the documentation, and a section of it after `#` or a comma."""
    sources = [file for each in SOURCES for file in ROOT.glob(each) if ".venv" not in file.parts]
    pages = re.compile(r"(?<![\w/.])((?:docs/)?[\w-]+\.md)(#[\w-]+|, [A-Z][\w ]+(?=\)))?")
    return [
        (str(file.relative_to(ROOT)), "".join(found))
        for file in sources
        for found in pages.findall(file.read_text(encoding="utf-8"))
        if found[0].startswith("docs/") or found[0] in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
    ]


def headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {*titles, *(re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles)}


def test_pages_and_sections_that_code_and_errors_name_exist() -> None:
    found = mentions()
    assert len(found) > 20
    wrong = []
    for file, mention in found:
        page, mark, section = re.match(r"([^#,]+)(#|, )?(.*)", mention).groups()  # type: ignore[union-attr]
        is_there = (ROOT / page).is_file() and (not mark or section in headings(ROOT / page))
        wrong += [] if is_there else [f"{file}: {mention}"]
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_sections_lead_to_headings(page: Path) -> None:
    links = re.findall(r"\]\(([\w/.-]*\.md)?#([\w-]+)\)", page.read_text(encoding="utf-8"))
    targets = [(page.parent / name if name else page, anchor) for name, anchor in links]
    assert not [anchor for target, anchor in targets if anchor not in headings(target)]
