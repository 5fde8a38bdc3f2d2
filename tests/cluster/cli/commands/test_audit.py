"""`outrider audit` at a served toy: exit status, report, page and replay."""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse

from cluster.cli.__main__ import main
from cluster.cli.audit import client, wire
from cluster.local.serve_environment import free_port
from tests.cluster.cli.audit.test_audit import app_of
from tests.cluster.cli.audit.toy_server import ToyServer
from tests.cluster.cli.fake_server import answering, events


@contextmanager
def serving(app: Starlette) -> Iterator[str]:
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


def served(fault: str = "") -> AbstractContextManager[str]:
    return serving(ToyServer(fault).app)


def test_a_finding_is_reported_and_repeated_with_one_curl(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    report, page = tmp_path / "audit.json", tmp_path / "audit.html"
    with served("ignored top_p") as url:
        arguments = ["audit", url, "--only", "top-p", "--only", "top-k", "--json", str(report), "--html", str(page)]
        assert main(arguments) == 1
        out = capsys.readouterr().out
        assert "found        top-p" in out
        assert "1 holds, 1 found" in out
        verdicts = {check["name"]: check["verdict"] for check in json.loads(report.read_text())["checks"]}
        assert verdicts == {"top-p": "found", "top-k": "holds"}
        assert "class=found>found" in page.read_text()
        assert main(["audit", "--replay", str(report)]) == 0
        curl, expected, seen, now = capsys.readouterr().out.splitlines()[1:5]
        assert expected.startswith("expected: ")
        assert seen.removeprefix("seen: ")
        first = seen.removeprefix("seen: ").split(", ")[0]
        assert first in now  # the same seed gives the same draws
        answer = subprocess.run(shlex.split(curl), capture_output=True, check=True).stdout
        assert len(json.loads(answer)["choices"]) == 64


def test_a_server_without_a_fault_exits_with_0(capsys: pytest.CaptureFixture[str]):
    with served() as url:
        assert main(["audit", url, "--only", "top-p", "--only", "speed"]) == 0
    assert "2 holds, 0 found" in capsys.readouterr().out


def test_a_flattering_speed_is_found(capsys: pytest.CaptureFixture[str]):
    with served("flattering speed") as url:
        assert main(["audit", url, "--only", "speed"]) == 1
    assert "found        speed" in capsys.readouterr().out


def test_a_stream_of_rubbish_is_a_sentence(capsys: pytest.CaptureFixture[str]):
    answer = events(b"{rubbish")
    with answering(answer, "text/event-stream") as url:
        assert main(["audit", url, "--only", "speed"]) == 2
    assert "speed: an answer is not in OpenAI's form" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("part", "words"), [(b" ", "no whole answer within 1 s"), (b" " * (1 << 16), "longer than 1 MiB")]
)
def test_an_answer_without_an_end_is_a_sentence(
    part: bytes, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    async def endless() -> AsyncIterator[bytes]:
        while True:
            yield part
            await asyncio.sleep(0.01)

    async def complete(request: Request) -> StreamingResponse:
        return StreamingResponse(endless(), media_type="application/json")

    monkeypatch.setattr(client, "TIMEOUT_S", 1.0)
    monkeypatch.setattr(wire, "_MAX_BYTES", 1 << 20)
    with serving(app_of(complete)) as url:
        assert main(["audit", url, "--only", "usage"]) == 2
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9/v1"),
        (["ftp://x"], "not the address of a server"),
        (["--only", "colour"], "--only 'colour' is not a check; the checks are usage, max-tokens"),
        (["--json", "/no/such/folder/x.json"], "give a file in an existing folder"),
        (["--replay", "/no/such/file.json"], "is not a report of --json"),
    ],
)
def test_a_wrong_argument_is_named(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]):
    assert main(["audit", *arguments]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "[]", '{"checks": [{}]}', '{"checks": [{"finding": {"request": 5}}]}'])
def test_a_file_that_is_no_report_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "audit.json"
    file.write_text(text)
    assert main(["audit", "--replay", str(file)]) == 1
    assert "is not a report of --json" in capsys.readouterr().err


@pytest.mark.parametrize(("server", "keys"), [("http://mine", ["Bearer secret"]), ("http://mine.example", [None])])
def test_a_replay_sends_the_key_to_the_given_server_alone(
    server: str, keys: list[str | None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """A report may come from a stranger, who would get the key."""
    request = {"url": f"{server}/v1/completions", "body": {"prompt": "x"}}
    check = {"name": "n", "claim": "c", "finding": {"request": request, "expected": "e", "seen": "s"}}
    (tmp_path / "report.json").write_text(json.dumps({"checks": [check]}))
    sent: list[str | None] = []

    def post(url: str, headers: dict[str, str], **_: object) -> httpx.Response:
        sent.append(headers.get("Authorization"))
        return httpx.Response(401, text="\x1b]0;title\x07no")

    monkeypatch.setattr(httpx, "post", post)
    assert main(["audit", "http://mine", "--replay", str(tmp_path / "report.json"), "--key", "secret"]) == 0
    assert sent == keys


def test_a_renamed_model_is_a_sentence(capsys: pytest.CaptureFixture[str]):
    with served() as url:
        assert main(["audit", url, "--only", "usage", "--model", "alias"]) == 0
    assert "answers name the model toy, not alias" in capsys.readouterr().out


def test_a_model_that_is_not_served_is_a_sentence(capsys: pytest.CaptureFixture[str]):
    with served() as url:
        assert main(["audit", url, "--only", "usage", "--model", "another"]) == 2
    assert "there is no model another" in capsys.readouterr().out
