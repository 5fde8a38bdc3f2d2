"""Keys come from a file, and a mistake in it never opens the door."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from protos.errors import AuthenticationError, ConfigError, RateLimitError
from router.api_keys import ANYONE, ApiKeys


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


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


def test_a_hash_stands_for_its_key_and_either_header_carries_it(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"sesame").hexdigest()
    for written in (digest, digest.upper()):
        keys = ApiKeys(write(tmp_path / "keys", f"sha256:{written} tenant=acme"))
        assert keys.check("Bearer sesame").tenant == keys.check(None, "sesame").tenant == "acme"
        with pytest.raises(AuthenticationError):
            keys.check(f"Bearer sha256:{written}")


@pytest.mark.parametrize("digits", ["", "ab" * 31 + "a", "ab" * 33, "xy" * 32])
def test_a_hash_that_is_none_is_refused_and_is_no_key(tmp_path: Path, digits: str) -> None:
    with pytest.raises(ConfigError, match=f"goes on with {len(digits)} characters; a hash has 64"):
        ApiKeys(write(tmp_path / "keys", f"sha256:{digits} tenant=acme"))


def test_a_changed_file_changes_the_keys_and_a_broken_one_does_not(tmp_path: Path) -> None:
    clock = [0.0]
    path = tmp_path / "keys"
    keys = ApiKeys(write(path, "old"), lambda: clock[0])
    write(path, "newer")
    clock[0] = 2.0
    keys.check("Bearer newer")
    with pytest.raises(AuthenticationError):
        keys.check("Bearer old")
    path.unlink()
    clock[0] = 4.0
    keys.check("Bearer newer")


def test_tenants_share_no_salt_and_no_conversation(tmp_path: Path) -> None:
    keys = ApiKeys(write(tmp_path / "keys", "a tenant=one", "b tenant=one", "c tenant=two", "d"))
    first, second, third, fourth = (keys.check(f"Bearer {key}") for key in "abcd")
    assert first.secret("s") == second.secret("s")
    salts = [client.secret(salt) for client in (first, third, fourth, ANYONE) for salt in ("", "s")]
    assert len(set(salts)) == len(salts)


def test_a_tenant_that_has_used_its_tokens_waits_alone(tmp_path: Path) -> None:
    clock = [0.0]
    path = write(tmp_path / "keys", "a tenant=one tokens_per_minute=60", "b tenant=one tokens_per_minute=60", "c")
    keys = ApiKeys(path, lambda: clock[0])
    keys.check("Bearer a").take(90)
    with pytest.raises(RateLimitError, match="60 tokens per minute") as caught:
        keys.check("Bearer b").take(1)
    assert caught.value.retry_after_s == 31.0
    keys.check("Bearer c").take(10**9)
    clock[0] = 31.0
    keys.check("Bearer b").take(1)


@pytest.mark.parametrize(
    "options",
    [
        "tenants=one",
        "tokens_per_minute=0",
        "tokens_per_minute=x",
        "acme",
        "weight=0",
        "max_priority=low",
        "tune_log=true",
    ],
)
def test_a_wrong_option_of_a_key_is_refused(tmp_path: Path, options: str) -> None:
    with pytest.raises(ConfigError, match="tenant=NAME"):
        ApiKeys(write(tmp_path / "keys", f"a {options}"))
