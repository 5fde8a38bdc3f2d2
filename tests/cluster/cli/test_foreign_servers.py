"""An address of a foreign server and a malformed answer each give one line and exit status 1."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.__main__ import main
from tests.cluster.cli.fake_server import answering, events

STREAM = "text/event-stream"
DEEP = pytest.param("[" * 100_000, id="deep")


def chunk(text: Any, finish_reason: str | None = None) -> dict[str, Any]:
    choice = {"index": 0, "text": text, "delta": {"content": text}, "finish_reason": finish_reason}
    return {"object": "text_completion", "choices": [choice]}


@pytest.fixture(autouse=True)
def a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))


@pytest.mark.parametrize("command", ["chat", "bench"])
@pytest.mark.parametrize(
    "models",
    ["<html>", "", "{}", "null", "[1, 2]", '{"data": null}', '{"data": [1]}', b'{"a": "\xff"}', '{"data": [{}]}', DEEP],
)
def test_another_web_server_is_named(command: str, models: bytes | str, capsys: pytest.CaptureFixture[str]):
    with answering("", models=models) as url:
        assert main([command, "--url", url]) == 1
    assert f"the server at {url} does not list its models: " in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "bench", "top", "draft show"])
@pytest.mark.parametrize("url", ["http://[", "http://127.0.0.1:x", "http://127.0.0.1:70000/v1", "x", ""])
def test_what_is_no_address_is_refused(command: str, url: str, capsys: pytest.CaptureFixture[str]):
    assert main([*command.split(), "--url", url]) == 1
    assert f"--url {url!r} is not the address" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "bench", "top", "draft show", "audit", "replay -"])
def test_a_key_that_no_header_can_carry_is_refused(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("OPENAI_API_KEY", "kéy")
    assert main(command.split()) == 1
    assert capsys.readouterr().err.startswith("\nerror: --api-key has a character that an HTTP header cannot carry")


def test_a_text_that_is_not_utf_8_is_not_the_servers_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.stdin", io.StringIO("caf\udce9\n"))  # a byte of Latin-1, read with LC_ALL=C
    with answering("", models='{"data": [{"id": "m"}]}') as url:
        assert main(["chat", "--url", url]) == 1
    assert "error: the request is not UTF-8 text: " in capsys.readouterr().err


def test_a_bound_without_end_is_refused(capsys: pytest.CaptureFixture[str]):
    assert main(["draft", "try", "/models/draft", "--min-gain=-inf"]) == 2
    assert "-inf is not a finite number" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["chat", "bench"])
@pytest.mark.parametrize(
    ("stream", "said"),
    [
        (events(chunk("hi")), "the answer broke off"),
        (events(chunk("hi"), {"error": {"message": "boom"}}), "boom"),
        (events(chunk("", "stop"), b"[DONE]"), "an answer without text"),
        (events(chunk("hi"), b"{bad"), "has an unexpected form"),
        (events(chunk("hi"), 3), "has an unexpected form"),
        (events({"choices": [{"delta": None, "text": None}]}, None), "has an unexpected form"),
        (events(b'{"a": "\xff\xfe"}'), "has an unexpected form"),
        (events({**chunk("hi", "stop"), "usage": {"completion_tokens": "many"}}), "has an unexpected form"),
    ],
)
def test_an_answer_that_is_none_has_failed(command: str, stream: bytes, said: str, capsys: pytest.CaptureFixture[str]):
    with answering(stream, STREAM) as url:
        assert main([command, "--url", url, *(["-n", "2"] if command == "bench" else [])]) == 1
    printed = capsys.readouterr()
    assert said in (printed.err if command == "chat" else printed.out)
    assert command == "chat" or "failed" in printed.out


@pytest.mark.parametrize("text", [5, "\ud800"])
def test_chat_cannot_print_what_is_no_text(text: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with answering(events(chunk(text, "stop")), STREAM) as url, (tmp_path / "out").open("w", encoding="utf-8") as out:
        monkeypatch.setattr("sys.stdout", out)
        assert main(["chat", "--url", url]) == 1


@pytest.mark.parametrize("command", ["chat", "bench"])
def test_a_whole_answer_has_not_failed(command: str):
    usage = {"choices": [], "usage": {"completion_tokens": 2}}
    with answering(events(chunk("hi"), chunk(" there", "stop"), usage, b"[DONE]"), STREAM) as url:
        assert main([command, "--url", url]) == 0


@pytest.mark.parametrize(
    "answer",
    [
        *("[1]", "null", '{"drafts": null}', '{"drafts": [{}]}', DEEP),
        "HTTP/1.1 abc OK\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{",
        pytest.param(f"HTTP/1.1 200 OK\r\nX: {'a' * 200_000}\r\n\r\n", id="long header"),
    ],
)
def test_drafts_that_are_none_are_refused(answer: str, capsys: pytest.CaptureFixture[str]):
    with answering(answer) as url:
        assert main(["draft", "show", "--url", url]) == 1
    assert f"cannot get the drafts from {url}" in capsys.readouterr().err


def test_a_draft_with_brackets_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]):
    names = {"replica": "[/bold]", "method": "[red]", "path": "a[/b]", "digest": "d"}
    with answering(json.dumps({"drafts": [{**names, "since": 1, "is_deployed": True}]})) as url:
        assert main(["draft", "show", "--url", url]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in names.values())


def test_metrics_that_break_off_are_refused(capsys: pytest.CaptureFixture[str]):
    with answering("HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n#") as url:
        assert main(["top", "--url", url]) == 1
    assert f"cannot get metrics from {url}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ttft-ms", "nan"], "Invalid value"),
        (["--ttft-ms", "-1"], "Invalid value"),
        (["--itl-ms", "-5"], "Invalid value"),
        (["--itl-ms", "inf"], "Invalid value"),
        (["--temperature", "inf"], "Invalid value"),
    ],
)
def test_options_are_checked_before_the_load(options: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "--url", "http://127.0.0.1:9", *options]) != 0
    assert said in " ".join(capsys.readouterr().err.split())
