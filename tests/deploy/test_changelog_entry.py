"""The section that a release gives its version in CHANGELOG.md."""

from __future__ import annotations

from datetime import date

import pytest

from deploy.changelog_entry import with_entry

DAY = date(2026, 11, 23)
HEAD = "# Changelog\n\n## [Unreleased]\n"
NEWS = "\n### Added\n\n- A thing.\n\n"
OLD = "## [0.1.0]\n\n- The first.\n"


def test_what_is_unreleased_becomes_the_versions_dated() -> None:
    expected = f"{HEAD}\n## [0.2.0] - 2026-11-23\n{NEWS}{OLD}"
    assert with_entry(HEAD + NEWS + OLD, "0.2.0", DAY) == expected
    assert with_entry(expected, "0.2.0", DAY) == expected, "a second run changes nothing"
    assert with_entry(HEAD + NEWS, "0.2.0", DAY) == f"{HEAD}\n## [0.2.0] - 2026-11-23\n{NEWS}", "the first release"


@pytest.mark.parametrize(
    ("changelog", "reason"), [(f"# Changelog\n{OLD}", "has no"), (f"{HEAD}\n{OLD}", "has no entry under")]
)
def test_a_release_without_news_is_refused(changelog: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        with_entry(changelog, "0.2.0", DAY)
