"""Keys come from a file, and a mistake in it never opens the door."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from protos.errors import AuthenticationError, ConfigError, RateLimitError
from router.api_keys import ANYONE, ApiKeys, Client


def test_every_line_is_a_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# team a\nfirst\n\n  second  \n", encoding="utf-8")
    keys = ApiKeys(str(file))
    for good in ("Bearer first", "bearer second", "Bearer  first "):
        keys.check(good)
    for bad in (None, "", "first", "Basic first", "Bearer ", "Bearer # team a", "Bearer firs"):
        with pytest.raises(AuthenticationError):
            keys.check(bad)


def test_without_a_file_everybody_may_call() -> None:
    ApiKeys(None).check(None)


@pytest.mark.parametrize("content", ["", "# only a comment\n"])
def test_a_file_without_a_key_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "keys").write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match="no key"):
        ApiKeys(str(tmp_path / "keys"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ApiKeys(str(tmp_path / "none"))


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


def test_a_budget_holds_one_minute_however_long_nobody_asks_and_outlives_a_change_of_the_file(tmp_path: Path) -> None:
    clock, path = [0.0], tmp_path / "keys"
    keys = ApiKeys(write(path, "a tenant=one tokens_per_minute=60"), lambda: clock[0])
    keys.check("Bearer a").take(10)
    clock[0] = 86_400.0
    keys.check("Bearer a").take(60)
    with pytest.raises(RateLimitError):
        keys.check("Bearer a").take(1)
    write(path, "a tenant=one tokens_per_minute=60", "b")
    clock[0] += 1.0
    keys.check("Bearer b")
    keys.check("Bearer a").take(1)
    with pytest.raises(RateLimitError):
        keys.check("Bearer a").take(1)


def admitted(keys: ApiKeys, *candidates: str) -> set[str]:
    """Return which of these keys are known."""
    found = set()
    for each in candidates:
        with suppress(AuthenticationError):
            keys.check(f"Bearer {each}")
            found.add(each)
    return found


def test_a_file_whose_reading_failed_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, path = [0.0], tmp_path / "keys"
    keys = ApiKeys(write(path, "old"), lambda: clock[0])
    write(path, "new")
    for error in (PermissionError("EACCES"), OSError("ESTALE")):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", Mock(side_effect=error))
            clock[0] += 300.0
            assert admitted(keys, "old", "new") == {"old"}
            assert keys.age_s >= 300.0
    clock[0] += 1.0
    assert admitted(keys, "old", "new") == {"new"}
    assert keys.age_s == 0.0


@pytest.mark.parametrize("content", ["", "# nothing\n", "wrong line\n", None])
def test_a_file_without_a_right_line_leaves_the_keys_and_says_how_old_they_are(
    tmp_path: Path, content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    clock, path = [0.0], tmp_path / "keys"
    keys = ApiKeys(write(path, "old"), lambda: clock[0])
    if content is None:
        path.unlink()
    else:
        path.write_text(content, encoding="utf-8")
    for _ in range(100):
        clock[0] += 1.0
        assert admitted(keys, "old", "wrong") == {"old"}
    assert keys.age_s == 100.0
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 2, "once a minute"
    write(path, "new")
    clock[0] += 1.0
    assert (admitted(keys, "old", "new"), keys.age_s) == ({"new"}, 0.0)


@pytest.mark.parametrize(
    "wrong",
    [b"carol secret-in-the-wrong-place", b"carol weight=0", b"sha256:12", b"\xff\xfe", b"bob tenant=other", b"caf\xc3"],
)
def test_a_removal_counts_in_a_file_with_a_wrong_line(
    tmp_path: Path, wrong: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    clock, path = [0.0], tmp_path / "keys"
    keys = ApiKeys(write(path, "alice", "bob", "carol"), lambda: clock[0])
    path.write_bytes(b"bob\n" + wrong + b"\ndora\n")
    clock[0] = 1.0
    assert admitted(keys, "alice", "bob", "carol", "dora") == {"bob", "dora"}
    assert (keys.num_wrong_lines, keys.age_s) == (1, 0.0)
    assert "line 2" in caplog.text
    assert "secret" not in caplog.text
    with pytest.raises(ConfigError, match="line 2"):
        ApiKeys(str(path))


def test_every_way_to_change_a_file_is_seen(tmp_path: Path) -> None:
    clock, path, other = [0.0], tmp_path / "keys", tmp_path / "other"
    keys = ApiKeys(write(path, "first"), lambda: clock[0])

    def see(*expected: str) -> None:
        clock[0] += 1.0
        assert admitted(keys, "first", "secon", "third", "fourth", "fifth") == set(expected)

    old = path.stat()
    write(path, "secon")  # of the same length, and with the old times: `cp -p` over it
    os.utime(path, ns=(old.st_atime_ns, old.st_mtime_ns))
    see("secon")
    write(other, "third")
    os.utime(other, (1.0, 1.0))
    other.rename(path)  # atomic
    see("third")
    for name, key in (("..one", "fourth"), ("..two", "fifth")):  # Kubernetes: a link to a folder is exchanged
        (tmp_path / name).mkdir()
        write(tmp_path / name / "keys", key)
    (tmp_path / "..data").symlink_to("..one")
    path.unlink()
    path.symlink_to("..data/keys")
    see("fourth")
    (tmp_path / "..new").symlink_to("..two")
    (tmp_path / "..new").rename(tmp_path / "..data")
    see("fifth")
    os.utime(path, (1.0, 1.0))
    see("fifth")
    os.utime(path, (1.0, 1.0))
    with path.open("ab") as file:
        file.write(b"\nfirst")
    os.utime(path, (1.0, 1.0))
    see("first", "fifth")


def test_a_change_is_seen_that_alters_no_time_and_no_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems keep times in steps of up to two seconds: two writes in one step look alike."""
    monkeypatch.setattr("router.api_keys._stamp_of", lambda status: (status.st_ino, status.st_size))
    clock, path = [0.0], tmp_path / "keys"
    keys = ApiKeys(write(path, "first"), lambda: clock[0])
    write(path, "secon")
    clock[0] = 1.0
    assert admitted(keys, "first", "secon") == {"secon"}


def test_marks_and_line_ends_of_other_systems_are_no_part_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b"\xef\xbb\xbffirst tenant=a\r\n\r\n# no key\r\nsecond\r\nsecond\r\n")
    assert admitted(ApiKeys(str(tmp_path / "keys")), "first", "second", "#") == {"first", "second"}


@pytest.mark.parametrize(
    ("authorization", "x_api_key", "tenant"),
    [
        ("Basic x", "good", "one"),
        ("Bearer wrong", "good", "one"),
        ("Bearer good", "wrong", "one"),
        ("Bearer good", "other", "one"),
        ("Bearer wrong", "worse", None),
        ("Basic good", None, None),
    ],
)
def test_one_known_key_is_enough(tmp_path: Path, authorization: str, x_api_key: str | None, tenant: str | None) -> None:
    keys = ApiKeys(write(tmp_path / "keys", "good tenant=one", "other tenant=two"))
    if tenant is not None:
        assert keys.check(authorization, x_api_key).tenant == tenant
        return
    with pytest.raises(AuthenticationError):
        keys.check(authorization, x_api_key)


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


def test_each_option_of_a_key_arrives(tmp_path: Path) -> None:
    options = "tenant=one tokens_per_minute=60 weight=2.5 max_priority=-3 admin=true tune_log=false"
    keys = ApiKeys(write(tmp_path / "keys", f"first {options}", "second tenant=one", "third"))
    first, second, third = (keys.check(f"Bearer {key}") for key in ("first", "second", "third"))
    assert first.rate is not None
    assert replace(first, rate=None) == Client("one", None, is_admin=True, weight=2.5, max_priority=-3, is_logged=False)
    assert second == Client("one", max_priority=0, is_logged=False), "one key of a tenant refuses for all of them"
    assert third == Client(third.tenant, max_priority=0)
    assert len({first.tenant, second.tenant, third.tenant}) == 2
