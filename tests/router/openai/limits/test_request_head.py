"""A server on loopback answers to its own names, whatever address a web page has given to another one."""

from __future__ import annotations

import asyncio
from functools import partial

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from router.api_keys import ApiKeys
from router.generation.generation_service import GenerationService
from router.openai.api import build_app
from router.openai.request_head import add_request_id
from tests.router.fixtures.key_files import api_keys

BODY = {"prompt": "abc", "max_tokens": 2}
OURS = ["localhost", "localhost:8000", "LOCALHOST.:1", "127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:8000", ""]
FOREIGN = ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.nip.io", "[::2]", "[", "a b", "0"]


def client(
    service: GenerationService, keys: ApiKeys, http_host: str | None, **settings: tuple[str, ...] | str
) -> httpx.AsyncClient:
    service.config = service.config.model_copy(update=settings)
    transport = httpx.ASGITransport(build_app(service, keys, http_host))
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.mark.parametrize(
    "sent", ["evil.example@localhost", "localhost/evil", "localhost?a", "local host", "a\\localhost"]
)
async def test_a_name_has_nothing_before_it_or_after_it_but_a_port(service: GenerationService, sent: str) -> None:
    async with client(service, ApiKeys(), "127.0.0.1") as http:
        assert (await http.get("/health", headers={"host": sent})).status_code == 421
        for hosts in (("localhost", "evil.example"), ("evil.example", "localhost")):
            assert (await http.get("/health", headers=[("host", each) for each in hosts])).status_code == 421


@pytest.mark.parametrize("http_host", ["127.0.0.1", "localhost", "::1"])
async def test_a_server_on_loopback_answers_to_its_own_names(service: GenerationService, http_host: str) -> None:
    async with client(service, ApiKeys(is_open_admin=True), http_host) as http:
        for name in OURS:
            assert (await http.post("/v1/completions", json=BODY, headers={"host": name})).status_code == 200, name
        for name in FOREIGN:
            for method, path in (("POST", "/v1/completions"), ("GET", "/metrics"), ("POST", "/admin/drafts/kill")):
                answer = await http.request(method, path, json=BODY, headers={"host": name})
                assert answer.status_code == 421, name
                assert "allowed_hosts" in answer.json()["error"]["message"]


async def test_more_names_may_be_configured(service: GenerationService) -> None:
    names = ("models.example", "*.lab.example")
    async with client(service, ApiKeys(), "127.0.0.1", allowed_hosts=names) as http:
        for name, status in (("models.example:443", 200), ("a.lab.example", 200), ("lab.example", 421), ("::1", 421)):
            assert (await http.get("/v1/models", headers={"host": name})).status_code == status
        assert (await http.get("/v1/models", headers={"host": "localhost"})).status_code == 200


async def test_elsewhere_a_server_answers_to_any_name_unless_some_are_configured(service: GenerationService) -> None:
    async with client(service, api_keys("secret"), "0.0.0.0") as http:
        assert (await http.get("/health", headers={"host": "evil.example"})).status_code == 200
    async with client(service, api_keys("secret"), "0.0.0.0", allowed_hosts=("models.example",)) as http:
        assert (await http.get("/health", headers={"host": "models.example"})).status_code == 200
        assert (await http.get("/health", headers={"host": "localhost"})).status_code == 421


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://evil.example", 403),
        ("null", 403),
        ("http://localhost.evil.example:8000", 403),
        ("http://localhost:3000", 200),
        ("http://127.0.0.1:8000", 200),
        ("https://app.example", 200),
    ],
)
async def test_without_keys_no_foreign_page_changes_anything(
    service: GenerationService, origin: str, status: int
) -> None:
    async with client(service, ApiKeys(), "127.0.0.1", cors_origins=("https://app.example",)) as http:
        assert (await http.post("/v1/completions", json=BODY, headers={"origin": origin})).status_code == status
        assert (await http.get("/v1/models", headers={"origin": origin})).status_code == 200


@pytest.mark.parametrize(
    ("sent", "is_kept"), [("mine-1", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("é", False)]
)
async def test_a_request_s_id_is_short_and_visible_or_made_anew(sent: str, is_kept: bool) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        [seen] = [value for name, value in scope["headers"] if name == b"x-request-id"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"x-seen", seen)]})
        await send({"type": "http.response.body"})

    transport = httpx.ASGITransport(partial(add_request_id, app))
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as http:
        answer = await http.get("/", headers={b"x-request-id": sent.encode()})
    assert answer.headers["x-request-id"] == answer.headers["x-seen"]
    assert (answer.headers["x-request-id"] == sent) == is_kept


async def test_a_burst_of_requests_leaves_the_event_loop_to_others(service: GenerationService) -> None:
    """A stream's token waits for a few of them at most in each turn of the loop."""
    app, turn, answered_in = build_app(service, ApiKeys()), 0, list[int]()
    headers = [(b"content-length", b"2")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answered_in.append(turn)

    burst = asyncio.gather(*(app(dict(scope), receive, send) for _ in range(400)))
    while not burst.done():
        turn += 1
        await asyncio.sleep(0)
    assert len(answered_in) == 400
    assert max(answered_in.count(each) for each in set(answered_in)) <= 8
