"""Give the version of pyproject.toml its section in CHANGELOG.md: the "Unreleased" entries, dated today.

A version that has its section already keeps it. Run by `deploy/release.sh`.
"""

from __future__ import annotations

import re
import sys
import tomllib
from datetime import date
from pathlib import Path

_UNRELEASED = "## [Unreleased]"


def with_entry(changelog: str, version: str, day: date) -> str:
    """Return the changelog with a section of `version`.

    Raises:
        ValueError: there is no "Unreleased" section, or nothing under it.
    """
    if re.search(rf"^## \[{re.escape(version)}\]", changelog, re.MULTILINE):
        return changelog
    before, heading, rest = changelog.partition(f"{_UNRELEASED}\n")
    if not heading:
        raise ValueError(f"CHANGELOG.md has no {_UNRELEASED!r}: write it, and below it the changes of {version}")
    news, *older = re.split(r"^(?=## \[)", rest, maxsplit=1, flags=re.MULTILINE)
    if not re.search(r"^- ", news, re.MULTILINE):
        raise ValueError(f"CHANGELOG.md has no entry under {_UNRELEASED!r}: write the changes of {version}")
    return f"{before}{heading}\n## [{version}] - {day.isoformat()}\n{news}{''.join(older)}"


def main() -> None:
    """Write the section, or print the error."""
    root = Path(__file__).resolve().parent.parent
    version = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    path = root / "CHANGELOG.md"
    try:
        path.write_text(with_entry(path.read_text(encoding="utf-8"), version, date.today()), encoding="utf-8")
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
