"""A request that offers an upgrade is answered through HAProxy too, by the server that Serve's replicas have."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Callable, Iterator

import pytest
import uvicorn
from starlette.responses import JSONResponse, PlainTextResponse

from router.api_keys import ApiKeys
from router.openai.api import build_app
from tests.cluster.local.fake_server import fake_service
from tests.cluster.local.test_http_server import UPGRADES, WEBSOCKET, send
from tests.cluster.proxy.test_haproxy_config import Proxy, start, status_of, wait_for

__all__ = ["start"]  # the fixture


@pytest.fixture
def proxy(start: Callable[..., Proxy]) -> Iterator[Proxy]:
    proxy = start()
    app = build_app(fake_service(), ApiKeys())
    app.add_route("/-/healthz", lambda _: PlainTextResponse("success"))  # Serve's, which HAProxy asks
    app.add_route("/headers", lambda request: JSONResponse(dict(request.headers)))
    app.add_route("/id", lambda request: PlainTextResponse(request.headers.get("x-request-id", "none")))
    server = uvicorn.Server(uvicorn.Config(app, port=proxy.server, lifespan="off", log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: status_of(proxy, "/live", "127.0.0.1") == 200)
    yield proxy
    server.should_exit = True
    thread.join()


def test_an_offered_upgrade_is_ignored_and_the_body_is_read(proxy: Proxy) -> None:
    for request in (each for each in UPGRADES if each != WEBSOCKET):  # HAProxy refuses a handshake by POST itself
        answer = asyncio.run(send(proxy.http, request))
        assert answer.startswith(b"HTTP/1.1 200 OK"), request
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 4


IDS = [("mine-1", "mine-1"), ("x" * 129, "none"), ("a b", "none"), ("é", "none")]


def test_an_id_that_does_not_belong_in_a_log_goes_no_further(proxy: Proxy) -> None:
    for sent, seen in IDS:
        client = http.client.HTTPConnection("127.0.0.1", proxy.http, timeout=20)
        client.request("GET", "/id", headers={"X-Request-Id": sent.encode()})
        assert client.getresponse().read().decode() == seen


SERVES_OWN = (
    *("serve_multiplexed_model_id", "serve-multiplexed-model-id", "X-Session-Id", "x_session_id"),
    *("x-request-timeout-seconds", "X-Request-Disconnect-Disabled", "traceparent", "tracestate"),
)


@pytest.mark.parametrize("name", SERVES_OWN)
def test_a_header_that_serve_cannot_read_goes_no_further(proxy: Proxy, name: str) -> None:
    """Serve decodes these as UTF-8 before our application runs, and answers 500 to an invalid byte."""
    for value, is_passed in ((b"a\xff", False), (b"\xe9", False), (b"12 a", True)):
        client = http.client.HTTPConnection("127.0.0.1", proxy.http, timeout=20)
        client.request("GET", "/headers", headers={"X-Other": "é".encode(), name: value, "X-Last": "z"})
        seen = json.load(client.getresponse())
        assert (name.lower() in seen) == is_passed
        assert {"x-other", "x-last"} <= seen.keys()
