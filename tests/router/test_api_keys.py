"""Keys come from a file, and a mistake in it never opens the door."""

from __future__ import annotations

from pathlib import Path

import pytest

from protos.errors import AuthenticationError, ConfigError
from router.api_keys import ApiKeys


def test_every_line_is_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team a\nfirst\n\n  second  \n", encoding="utf-8")
    keys = ApiKeys.from_file(str(file))
    for good in ("Bearer first", "bearer second", "Bearer  first "):
        keys.check(good)
    for bad in (None, "", "first", "Basic first", "Bearer ", "Bearer # team a", "Bearer firs"):
        with pytest.raises(AuthenticationError):
            keys.check(bad)


def test_without_a_file_everybody_may_call() -> None:
    ApiKeys.from_file(None).check(None)


@pytest.mark.parametrize("content", ["", "# only a comment\n"])
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "keys").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="no key"):
        ApiKeys.from_file(str(tmp_path / "keys"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys.from_file(str(tmp_path / "none"))
