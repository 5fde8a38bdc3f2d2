"""`outrider draft` sends orders to a server, and prints its answer or its refusal."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cluster.cli.__main__ import main

CANARY = {
    **{"name": "new", "old_name": "old", "outcome": "rolled_back", "reason": "it gains less than 5.0%"},
    **{"num_pairs": 7, "gain": -0.1, "low": -0.2, "high": 0.01},
}
DRAFT = {
    **{
        "name": "old",
        "method": "prose",
        "digest": "abcd",
        "since": 1700000000,
        "is_deployed": False,
        "replica": "pair-1",
    },
    **{"path": "/models/old", "canary": CANARY},
}


class Server(ThreadingHTTPServer):
    """Answers every order with `DRAFT`, but refuses a path that ends in nan."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _OrderHandler)
        self.orders: list[tuple[str, str | None, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class _OrderHandler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        self.server.orders.append((self.path, self.headers["Authorization"], body))
        is_refused = body is not None and body.get("path", "").endswith("nan")
        answer = {"error": {"message": "1 value is NaN"}} if is_refused else {"drafts": [DRAFT]}
        data = json.dumps(answer).encode()
        self.send_response(400 if is_refused else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_drafts_are_shown_with_what_became_of_a_trial(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draft", "show", "--url", server.url, "--api-key", "boss"]) == 0
    text = capsys.readouterr().out
    assert all(part in text for part in ("pair-1", "prose", "/models/old", "abcd"))
    assert server.orders == [("/admin/drafts", "Bearer boss", None)]


def test_a_pipe_gets_each_draft_in_one_whole_line(server: Server) -> None:
    command = [sys.executable, "-m", "cluster.cli", "draft", "show", "--url", server.url]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (row,) = (line for line in text.splitlines() if "pair-1" in line)
    assert "/models/old (deploy.yaml has another)" in row
    assert "new rolled back, 7 pairs of blocks, gain -10.0% (-20.0% to +1.0%): it gains less than 5.0%" in row


def test_orders_have_absolute_paths_and_the_options(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = str(tmp_path / "new")
    assert main(["draft", "swap", "new", "--url", server.url, "--wait-s", "7"]) == 0
    assert main(["draft", "try", "new", "--url", server.url, "--max-pairs", "9"]) == 0
    assert main(["draft", "stop", "--url", server.url]) == 0
    assert main(["draft", "swap", "new", "--url", server.url, "--method", "prose"]) == 0
    (swap, _, body), (canary, _, limits), (stop, _, nothing), (_, _, named) = server.orders
    assert (swap, body) == ("/admin/drafts/swap", {"path": path, "wait_s": 7.0})
    assert (canary, limits["path"], limits["max_pairs"], len(limits)) == ("/admin/drafts/canary", path, 9, 8)
    assert named == {"path": path, "wait_s": 120.0, "method": "prose"}
    assert (stop, nothing) == ("/admin/drafts/canary/stop", {})


def test_a_refusal_is_the_servers_and_no_server_is_said(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["draft", "swap", "/models/nan", "--url", server.url]) == 1
    assert "1 value is NaN" in capsys.readouterr().err
    assert main(["draft", "show", "--url", "http://127.0.0.1:9"]) == 1
    assert "give --url" in capsys.readouterr().err
