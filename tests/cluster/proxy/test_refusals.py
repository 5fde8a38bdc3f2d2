"""HAProxy refuses by itself most requests of a client that meets refusals, and lets through as many as are answered."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.proxy import haproxy_config
from cluster.proxy.haproxy_config import ProxySettings
from router.metrics.exposition import ANSWERS_HEADER, proxy_text
from tests.cluster.proxy.test_haproxy_config import Proxy, start, status_of, wait_for

__all__ = ["start"]  # the fixture


class FullServer(BaseHTTPRequestHandler):
    """An ingress whose pairs are full, for everything that is posted."""

    protocol_version = "HTTP/1.1"
    num_asked = 0
    is_marked = True
    status = 503

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        FullServer.num_asked += 1
        is_marked = self.is_marked and self.status != 200
        self._answer(self.status, {"Retry-After": "7"} | ({"X-Outrider-Full": "1"} if is_marked else {}))

    def do_GET(self) -> None:
        self._answer(200, {"Seen-Answers": self.headers.get(ANSWERS_HEADER, "")})

    def _answer(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": "2"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def proxy(start: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """HAProxy before a full server; a refusal counts for longer than a test takes."""
    tables = haproxy_config._REFUSED_CLIENTS.replace("2s)", "40s)").replace("5s)", "40s)")
    monkeypatch.setattr(haproxy_config, "_REFUSED_CLIENTS", tables)
    yield from serve(start, monkeypatch)


@pytest.fixture
def usual_proxy(start: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    yield from serve(start, monkeypatch)


def serve(
    start: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch, settings: ProxySettings = ProxySettings()
) -> Iterator[Proxy]:
    monkeypatch.setattr(FullServer, "num_asked", 0)
    proxy = start(settings)
    server = ThreadingHTTPServer(("127.0.0.1", proxy.server), FullServer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    wait_for(lambda: ask(proxy, "GET", f"{proxy.prefix.rstrip('/')}/v1/models")[0] == 200)
    yield proxy
    server.shutdown()
    server.server_close()


def ask(
    proxy: Proxy, method: str = "POST", path: str = "/v1/completions", body: bytes = b"{}", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    client = http.client.HTTPConnection("127.0.0.1", proxy.http, timeout=20)
    client.request(method, path, None if method == "GET" else body, headers)
    answer = client.getresponse()
    answered = answer.read()
    client.close()
    return answer.status, answer.headers, answered


def test_a_client_s_next_requests_are_refused_without_the_ingress(proxy: Proxy) -> None:
    _, headers, body = ask(proxy, Authorization="Bearer a")
    assert (body, headers["X-Outrider-Full"]) == (b"{}", None), "the mark is not the client's"
    status, headers, body = ask(proxy, Authorization="Bearer a")
    assert (status, headers["Retry-After"]) == (503, "7")
    assert json.loads(body)["error"]["code"] == "overloaded"
    assert json.loads(ask(proxy, path="/v1/messages", Authorization="Bearer a")[2])["type"] == "error"
    assert FullServer.num_asked == 1


def test_its_own_refusals_make_no_work_for_serve_s_manager(proxy: Proxy) -> None:
    """The manager reads each line of the log: in Python, for as long as HAProxy's own part of a refusal takes."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(proxy.folder / "lines"))
        manager.settimeout(20)
        for _ in range(4):
            ask(proxy, Authorization="Bearer a")
        ask(proxy, "GET", "/v1/models")
        methods = [re.findall(rb'method="(\w+)"', manager.recv(8192)) for _ in range(2)]
    assert sorted(methods) == [[b"GET"], [b"POST"]], (
        "one line of the four refusals; each of the two threads logs its own"
    )


def test_what_the_proxy_answers_by_itself_is_counted_for_a_scrape(proxy: Proxy) -> None:
    """400 of 400 refusals were seen by clients, and one by the ingress."""

    def counts() -> list[int]:
        _, headers, _ = ask(proxy, "GET", "/metrics", **{"X-Outrider-Proxy-Answers": "9 9 9"})
        return [int(count) for count in headers["Seen-Answers"].split()]

    before = counts()  # the server was not there at first
    for _ in range(5):
        ask(proxy, Authorization="Bearer a")
    ask(proxy, "PUT", "/v1/completions", b"a" * 50_000)
    ask(proxy, "GET", "/v1/models")
    assert [now - then for now, then in zip(counts(), before, strict=True)] == [4, 1, 0]
    samples = next(iter(text_string_to_metric_families(proxy_text("4 1 0")))).samples
    assert {each.labels["kind"]: each.value for each in samples} == {"refused": 4, "client": 1, "server": 0}
    assert proxy_text("") == proxy_text("1 2 x") == ""


def test_other_clients_and_other_paths_are_not_refused(proxy: Proxy) -> None:
    ask(proxy, **{"x-api-key": "a"})
    ask(proxy, **{"x-api-key": "b"})
    ask(proxy, path="/tokenize", **{"x-api-key": "a"})
    assert FullServer.num_asked == 3
    assert ask(proxy, "GET", "/health", **{"x-api-key": "a"})[0] == 200


def test_a_key_is_one_client_however_it_is_sent(proxy: Proxy) -> None:
    """The application reads one key of a request: what else a client sends makes it no other client."""
    same: list[dict[str, str]] = [
        {"Authorization": "Bearer {}", "x-api-key": "random"},
        {"Authorization": "bearer  {}"},
        {"x-api-key": "{}"},
        {"Authorization": "", "x-api-key": "{}"},
    ]
    for number, headers in enumerate(same):
        ask(proxy, Authorization=f"Bearer key-{number}")
        named = {name: value.format(f"key-{number}") for name, value in headers.items()}
        assert ask(proxy, **named)[0] == 503
        assert FullServer.num_asked == number + 1, headers


def test_a_path_is_refused_however_it_is_written(proxy: Proxy) -> None:
    ask(proxy)
    for path in ("/v1/%63ompletions", "/v1/completions/", "/v1/completions?a=b", "/v1/completions%2F"):
        ask(proxy, path=path)
        assert FullServer.num_asked == 1, path


def test_a_prefix_of_routes_changes_no_rule(start: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Proxy, "prefix", "/llm")
    tables = haproxy_config._REFUSED_CLIENTS.replace("2s)", "40s)").replace("5s)", "40s)")
    monkeypatch.setattr(haproxy_config, "_REFUSED_CLIENTS", tables)
    for proxy in serve(start, monkeypatch, ProxySettings(operator_addresses="127.0.0.9")):
        for _ in range(3):
            ask(proxy, path="/llm/v1/completions")
        assert FullServer.num_asked == 1
        assert json.loads(ask(proxy, path="/llm/v1/messages")[2])["type"] == "error"
        for path in ("/llm/metrics", "/llm/metrics/", "/llm/%6Detrics"):
            assert status_of(proxy, path, "127.0.0.2") == 403
        assert status_of(proxy, "/llm/metrics", "127.0.0.9") == 200


def test_clients_without_credentials_are_told_apart_by_their_addresses(proxy: Proxy) -> None:
    assert ask(proxy)[1]["Retry-After"] == "7"
    assert FullServer.num_asked == 1
    for source in ("127.0.0.1", "127.0.0.2"):
        client = http.client.HTTPConnection("127.0.0.1", proxy.http, timeout=20, source_address=(source, 0))
        client.request("POST", "/v1/completions", b"{}")
        assert client.getresponse().status == 503
        client.close()
    assert FullServer.num_asked == 2


def test_the_ingress_is_asked_again_soon(usual_proxy: Proxy) -> None:
    ask(usual_proxy)
    began_s = time.monotonic()
    wait_for(lambda: bool(ask(usual_proxy)) and FullServer.num_asked == 2)
    assert time.monotonic() - began_s < 10


def test_a_refusal_without_the_mark_concerns_one_request(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FullServer, "is_marked", False)
    for _ in range(3):
        ask(proxy)
    assert FullServer.num_asked == 3


def test_a_client_without_refusals_is_not_limited(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FullServer, "status", 200)
    for _ in range(9):
        ask(proxy)
    monkeypatch.setattr(FullServer, "status", 503)
    ask(proxy)
    assert FullServer.num_asked == 10


def test_answers_let_a_quarter_more_requests_through(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FullServer, "status", 200)
    for _ in range(8):
        ask(proxy)
    monkeypatch.setattr(FullServer, "status", 503)
    for _ in range(9):
        ask(proxy)
    assert FullServer.num_asked == 8 + 8 // 4 + 1
