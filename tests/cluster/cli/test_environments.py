"""Commands in environments that other programs have set up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.cli.__main__ import main
from cluster.cli.deployment import deployment_of
from cluster.cli.serve_view import invitation
from cluster.deploy_file import checked_deployment, with_absolute_paths
from tests.cluster.cli.fake_server import answering, events

CHUNK = {"object": "text_completion", "choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}


@pytest.mark.parametrize("proxy", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def test_a_proxy_of_the_environment_is_not_asked_for_a_server_of_this_machine(
    proxy: str, monkeypatch: pytest.MonkeyPatch
):
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")  # so that the command's own setting is undone
    monkeypatch.setenv(proxy, "http://127.0.0.1:9")  # nobody listens there
    with answering(events(CHUNK), "text/event-stream") as url:
        assert main(["bench", "--url", url, "-n", "1", "--max-tokens", "1", "--prompt-words", "1"]) == 0
    drafts = json.dumps({"drafts": []})
    with answering(drafts) as url:
        assert main(["draft", "show", "--url", url]) == 0


def test_hosts_that_need_no_proxy_are_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NO_PROXY", "intern.example")
    monkeypatch.delenv("no_proxy", raising=False)
    main(["env"])
    for name in ("NO_PROXY", "no_proxy"):
        assert os.environ[name] == "intern.example,localhost,127.0.0.1,::1,0.0.0.0"


def test_a_folder_that_is_gone_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["check", "deploy.yaml"]) == 1
    assert "the current folder is gone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("MAX_CONNECTIONS_PER_ADDRESS", "-3", "is '-3'; set it to a number of 4 or more"),
        ("MAX_CONNECTIONS_PER_ADDRESS", "many", "is 'many'; set it to"),
        ("OPERATOR_ADDRESSES", "10.0.0.1, prometheus", "has 'prometheus': "),
    ],
)
def test_a_limit_that_no_proxy_can_keep_is_refused_before_the_start(
    name: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv(f"OUTRIDER_{name}", value)
    assert main(["serve", "demo", "--no-ray"]) == 1
    assert f"error: OUTRIDER_{name} {message}" in capsys.readouterr().err


def test_closed_standard_streams_are_empty_ones():
    """A service manager may start a command without them."""
    code = "from cluster.cli.__main__ import main; import sys; sys.exit(main(['replay', '-']))"
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -c "$1" <&- >&-', sys.executable, code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stderr.startswith("\nerror: - holds no records")


def test_a_full_disk_below_the_output_is_told_in_a_sentence():
    command = [sys.executable, "-m", "cluster.cli", "serve", "demo", "--print"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "\nerror: [Errno 28] No space left on device\n")


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"), ("localhost", "localhost"), ("0.0.0.0", "0.0.0.0")],
)
def test_an_address_can_be_copied_whatever_the_host_is(host: str, address: str):
    text = invitation(checked_deployment(deployment_of("demo", host=host), "demo"))
    assert f"HTTP   http://{address}:8000/v1 " in text
    assert f"gRPC   {address}:9000 " in text


def test_relative_paths_are_those_of_the_folder_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small").mkdir()
    args = {"tune": {"log": "my log"}, "drafts": {"a": "small", "b": "org/b"}}
    changed = with_absolute_paths({"applications": [{"args": args}]})["applications"][0]["args"]
    assert changed["tune"] == {"log": str(tmp_path / "my log")}
    assert changed["drafts"] == {"a": str(tmp_path / "small"), "b": "org/b"}
