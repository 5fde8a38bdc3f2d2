"""Files of a deployment are its user's alone, wherever Ray makes its folders with mode 0777."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path

import pytest

from cluster.cli.__main__ import main
from cluster.local import check_file_limit, is_private, private_root
from cluster.local.serve_environment import warn_of_open_folders
from protos.errors import ConfigError


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("cluster.local._ROOT", tmp_path)
    return tmp_path


def mode(path: str | Path) -> int:
    return stat.S_IMODE(Path(path).stat().st_mode)


def test_sessions_of_ray_lie_in_a_folder_of_this_user(root: Path):
    folder = private_root()
    assert mode(folder) == 0o700
    assert private_root() == folder
    Path(folder).chmod(0o755)
    assert mode(private_root()) == 0o700
    session = Path(folder, "ray", "session")
    session.mkdir(parents=True)
    session.chmod(0o777)
    assert is_private(session)


def test_a_name_that_another_has_taken_is_not_used(root: Path):
    (root / "others").mkdir(mode=0o777)
    (root / f"outrider-{os.getuid()}").symlink_to(root / "others")
    folder = Path(private_root())
    assert folder.parent == root
    assert not folder.is_symlink()
    assert mode(folder) == 0o700


def test_a_session_that_others_can_enter_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tmp_path.chmod(0o700)
    warn_of_open_folders(tmp_path)
    assert caplog.text == ""
    warn_of_open_folders(Path("/tmp"))
    assert "other users of this machine can read Ray's logs and replace its sockets in /tmp" in caplog.text


def test_a_hand_started_cluster_gets_the_folder_and_the_umask(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    assert main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"export RAY_TMPDIR={root}/outrider-{os.getuid()}" in lines
    assert "export RAY_USAGE_STATS_ENABLED=0" in lines
    assert "umask 077" in lines


def test_too_few_open_files_are_refused_before_haproxy_dies_of_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: None)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, 4096))
    with pytest.raises(ConfigError, match=r"may open 4096 files here, and HAProxy and Ray's processes need 16384"):
        check_file_limit()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (256, resource.RLIM_INFINITY))
    check_file_limit()
