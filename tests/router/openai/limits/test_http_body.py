"""Bodies that are read at once share a budget of bytes."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import time
import tracemalloc
import zlib
from collections.abc import AsyncIterator

import httpx
import pytest
from pydantic import ValidationError

from protos.errors import RequestError
from router.config import IngressLimits
from router.generation.generation_service import GenerationService
from router.openai import http_body
from router.openai.api import build_app
from router.requests.body import as_request_error
from router.requests.chat_request import ChatCompletionRequest
from router.requests.completion_request import CompletionRequest
from tests.router.fixtures.fake_backend import FakeBackend
from tests.router.fixtures.key_files import api_keys

REQUEST = {"model": "fake", "prompt": "abc", "max_tokens": 4}
BODY = json.dumps(REQUEST).encode().rjust(5_000)
HEADERS = {"content-type": "application/json"}


@pytest.fixture
def limits() -> IngressLimits:
    return IngressLimits(max_body_bytes=18_000)


@pytest.fixture(autouse=True)
def small_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_body, "BODIES_IN_FLIGHT", 1)


@pytest.fixture
async def http(base_url: str) -> AsyncIterator[httpx.AsyncClient]:
    """Clients of a real server, which sees a body as it comes."""
    async with httpx.AsyncClient(base_url=base_url.removesuffix("/v1")) as client:
        yield client


async def bytes_held(http: httpx.AsyncClient) -> float:
    text = (await http.get("/metrics")).text
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith("outrider_http_body_bytes"))


async def until_held(http: httpx.AsyncClient, num_bytes: int) -> None:
    async with asyncio.timeout(20):
        while await bytes_held(http) != num_bytes:  # noqa: ASYNC110 - each look is a request
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_announced", [True, False])
async def test_bodies_share_a_budget_and_give_it_back(
    http: httpx.AsyncClient, backend: FakeBackend, is_announced: bool
) -> None:
    """While three bodies of 5 kB wait for their ends, a fourth has no room, but a small one has."""
    rest = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield BODY[:-1]
        await rest.wait()
        yield BODY[-1:]

    async def fast() -> AsyncIterator[bytes]:
        yield BODY

    slow_ones = [asyncio.create_task(http.post("/v1/completions", content=slow(), headers=HEADERS)) for _ in range(3)]
    await until_held(http, 3 * (len(BODY) - 1))
    refused = await http.post("/v1/completions", content=BODY if is_announced else fast(), headers=HEADERS)
    assert refused.status_code == 503
    assert "18000 are the most here" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    small = await http.post("/v1/completions", json=REQUEST)
    assert small.status_code == 200
    rest.set()
    assert [answer.status_code for answer in await asyncio.gather(*slow_ones)] == [200] * 3
    await until_held(http, 0)


async def test_a_client_that_goes_away_leaves_its_room(http: httpx.AsyncClient) -> None:
    async def never() -> AsyncIterator[bytes]:
        yield BODY[:-1]
        await asyncio.Event().wait()

    gone = asyncio.create_task(http.post("/v1/completions", content=never(), headers=HEADERS))
    await until_held(http, len(BODY) - 1)
    gone.cancel()
    await until_held(http, 0)


async def test_a_body_without_a_key_is_not_waited_for(service: GenerationService) -> None:
    async def body(*, is_whole: bool) -> AsyncIterator[bytes]:
        yield BODY[:100]
        if not is_whole:
            await asyncio.Event().wait()
        yield BODY[100:]

    transport = httpx.ASGITransport(build_app(service, api_keys("secret")))
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as client:
        for key, status in (("wrong", 401), ("secret", 200)):
            headers = {**HEADERS, "authorization": f"Bearer {key}"}
            content = body(is_whole=key == "secret")
            answer = await asyncio.wait_for(client.post("/v1/completions", content=content, headers=headers), 10)
            assert answer.status_code == status


class TestLargeBodies:
    """Bodies of more than a mebibyte are counted before they are read."""

    @pytest.fixture
    def limits(self) -> IngressLimits:
        return IngressLimits(max_body_bytes=8 << 20)

    @pytest.mark.parametrize(
        ("path", "body", "words"),
        [
            ("/v1/completions", {"prompt": [[5]] * 300_000}, "The body holds 300007 lists"),
            ("/v1/completions", {"prompt": "x", "other": [5] * 1_300_000}, "The body holds 1300002 values"),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "A"}}]}]},
                "the arguments of a message's tool call holds 400001 lists",
            ),
        ],
    )
    async def test_too_many_things_are_refused_unread(
        self, http: httpx.AsyncClient, path: str, body: dict[str, object], words: str
    ) -> None:
        content = json.dumps({"model": "fake", **body}).replace('"A"', json.dumps("[" + "[]," * 400_000 + "0]"))
        answer = await http.post(path, content=content, headers=HEADERS)
        assert answer.status_code == 400
        assert words in answer.json()["error"]["message"]

    async def test_a_long_text_is_read(self, http: httpx.AsyncClient) -> None:
        text = 'a, "b": [{' * 400_000
        answer = await http.post("/v1/completions", json={**REQUEST, "prompt": text})
        assert "4000000 characters. Please reduce the length of the prompt" in answer.json()["error"]["message"]


TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("schema", "body", "words"),
    [
        (CompletionRequest, {"prompt": [[5]] * 1_000_000}, "1000000 prompts; send at most 4096"),
        (ChatCompletionRequest, {"messages": [1] * 1_000_000}, r"\.\.\.; it must be at most 65536 items long"),
        (ChatCompletionRequest, {"messages": [], "tools": [TOOL] * 100_000}, "messages is"),
    ],
)
def test_a_body_of_a_million_items_is_refused_in_parts_of_a_second(
    schema: type[CompletionRequest], body: dict[str, object], words: str
) -> None:
    """The event loop waits meanwhile; the first of them took it two seconds and more."""
    raw = json.dumps(body)
    gc.disable()  # as for a body
    began_s = time.thread_time()
    with pytest.raises((RequestError, ValidationError)) as refused:
        schema.model_validate_json(raw)
    error = refused.value
    if isinstance(error, ValidationError):
        error = as_request_error(error, schema)
    seconds = time.thread_time() - began_s
    gc.enable()
    assert re.search(words, str(error))
    assert seconds < 1.0


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_bomb_is_never_expanded_beyond_the_limit(service: GenerationService, encoding: str) -> None:
    """Its status alone does not show it: 413 also came when all of it had been expanded."""
    limits = IngressLimits()
    object.__setattr__(service.config, "limits", limits)
    compressor = zlib.compressobj(1, zlib.DEFLATED, (16 if encoding == "gzip" else 0) + zlib.MAX_WBITS)
    block = b" " * (1 << 20)
    bomb = b"".join(compressor.compress(block) for _ in range(512)) + compressor.flush()
    transport = httpx.ASGITransport(build_app(service, api_keys("secret")))
    headers = {**HEADERS, "content-encoding": encoding, "x-api-key": "secret"}
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider", headers=headers) as client:
        for content in (bomb, bomb[:-8]):
            tracemalloc.start()
            answer = await client.post("/v1/completions", content=content)
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert answer.status_code == 413
            assert peak < 3 * limits.max_body_bytes
