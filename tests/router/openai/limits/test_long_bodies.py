"""A long body leaves the event loop to other streams: it is refused by its length, or a worker thread reads it."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import httpx
import pytest

from protos import outrider_pb2 as pb2
from protos import outrider_pb2_grpc
from router.config import IngressLimits
from router.generation.generation_service import GenerationService
from router.openai.api import build_app
from tests.router.conftest import TEMPLATE, chat_template
from tests.router.fixtures.fake_backend import FakeBackend, say
from tests.router.fixtures.grpc_channel import grpc_channel
from tests.router.fixtures.key_files import api_keys

Answer = TypeVar("Answer")
NUM_IDS, NUM_TURNS, CONTEXT = 600_000, 9_000, 30_000
MOST_S = 0.2  # of the event loop's own processor time in one go; a body of ours takes several times as long
HEADERS = {"content-type": "application/json"}
TURNS = [{"role": ("user", "assistant")[rank % 2], "content": f"turn {rank}"} for rank in range(NUM_TURNS + 1)]


@pytest.fixture
def limits() -> IngressLimits:
    return IngressLimits()


@pytest.fixture
def service(service: GenerationService, backend: FakeBackend) -> GenerationService:
    backend.card, backend.next_token = replace(backend.card, max_model_len=CONTEXT), say(0)
    files = replace(service.files, chat_template=chat_template(TEMPLATE))
    return GenerationService(backend, files, service.config, service.metrics)


async def longest_turn(call: Awaitable[Answer]) -> tuple[Answer, float]:
    """Return the answer, and the longest processor time of this thread between two turns of its event loop.

    Objects that other tests have left are not collected meanwhile.
    """
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        last = time.thread_time()
        while True:
            await asyncio.sleep(0)
            longest, last = max(longest, time.thread_time() - last), time.thread_time()

    gc.freeze()
    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)
    try:
        return await call, longest
    finally:
        watching.cancel()
        gc.unfreeze()


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/v1/completions", {"prompt": [5] * NUM_IDS}, f"{NUM_IDS} tokens"),
        ("/v1/completions", {"prompt": "x", "mood": [5] * NUM_IDS, "max_tokens": 1}, None),
        ("/v1/completions", {"prompt": [5] * NUM_IDS, "truncate_prompt_tokens": 9, "max_tokens": 1}, None),
        ("/detokenize", {"tokens": [5] * NUM_IDS}, f"tokens holds {NUM_IDS} token ids; at most {CONTEXT}"),
        ("/tokenize", {"messages": TURNS}, None),
        ("/tokenize", {"prompt": "a b " * 40_000, "return_token_strs": True}, None),
        ("/v1/chat/completions", {"messages": TURNS}, "your messages resulted in"),
        ("/v1/responses", {"input": TURNS}, "your messages resulted in"),
        ("/v1/messages", {"messages": TURNS, "max_tokens": 1}, "prompt is too long"),
        ("/v1/messages/count_tokens", {"messages": TURNS}, None),
    ],
)
async def test_a_long_body_takes_little_of_the_event_loop_s_time(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], words: str | None
) -> None:
    content = json.dumps(body).encode()
    answer, longest_s = await longest_turn(http.post(path, content=content, headers=HEADERS))
    assert answer.status_code == (200 if words is None else 400), answer.text[:500]
    assert words is None or words in answer.json()["error"]["message"]
    assert longest_s < MOST_S


async def test_a_long_message_of_grpc_takes_little_of_the_event_loop_s_time(service: GenerationService) -> None:
    turns = [pb2.ChatMessage(role=turn["role"], content=turn["content"]) for turn in TURNS]
    async with grpc_channel(service) as channel:
        stub = outrider_pb2_grpc.GenerationStub(channel)
        calls: list[Callable[[], Awaitable[Any]]] = [
            lambda: stub.Generate(pb2.GenerateRequest(messages=turns)),
            lambda: stub.Generate(pb2.GenerateRequest(prompt_token_ids=[5] * NUM_IDS)),
        ]
        for call in calls:
            longest_s = 0.0
            with pytest.raises(grpc.aio.AioRpcError, match=f"maximum context length is {CONTEXT}"):
                _, longest_s = await longest_turn(call())
            assert longest_s < MOST_S
        counted, longest_s = await longest_turn(stub.Tokenize(pb2.TokenizeRequest(messages=turns)))
        assert counted.count > CONTEXT
        assert longest_s < MOST_S


async def test_ids_are_read_as_many_as_the_context_holds(http: httpx.AsyncClient) -> None:
    """Too many are refused by their number, before one of them is looked at."""
    unknown = [10**9] * (CONTEXT + 1)
    assert f"{CONTEXT + 1} tokens" in (await http.post("/v1/completions", json={"prompt": unknown})).text
    assert f"holds {CONTEXT + 1} token ids" in (await http.post("/detokenize", json={"tokens": unknown})).text
    for num_tokens, status in ((CONTEXT - 1, 200), (CONTEXT, 400)):
        body = {"prompt": [98] * num_tokens, "max_tokens": 1}
        assert (await http.post("/v1/completions", json=body)).status_code == status
    for num_tokens, status in ((CONTEXT, 200), (CONTEXT + 1, 400)):
        answer = await http.post("/detokenize", json={"tokens": [98] * num_tokens})
        assert answer.status_code == status
    assert (await http.post("/detokenize", json={"tokens": [98] * 5000})).json() == {"prompt": "a" * 5000}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a" * 400}),
        ("/tokenize", {"messages": [{"role": "user", "content": "a" * 400}], "truncate_prompt_tokens": 1}),
        ("/detokenize", {"tokens": [98] * 400}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "a" * 400}]}),
    ],
)
async def test_tokens_that_are_counted_or_written_as_text_count_in_the_tenant_s_rate(
    service: GenerationService, path: str, body: dict[str, Any]
) -> None:
    keys = api_keys("secret tokens_per_minute=300")
    transport = httpx.ASGITransport(build_app(service, keys))
    headers = {"authorization": "Bearer secret"}
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider", headers=headers) as http:
        assert [(await http.post(path, json=body)).status_code for _ in range(2)] == [200, 429]


async def test_grpc_charges_for_tokens_and_for_refusals(service: GenerationService) -> None:
    metadata = (("authorization", "Bearer secret"),)
    wrong = pb2.TokenizeRequest(messages=[pb2.ChatMessage(role="nobody", content="a" * 1500)])
    for request, code in ((pb2.TokenizeRequest(prompt="a" * 400), None), (wrong, "INVALID_ARGUMENT")):
        async with grpc_channel(service, api_keys("secret tokens_per_minute=300")) as channel:
            stub = outrider_pb2_grpc.GenerationStub(channel)
            codes = [await outcome(stub.Tokenize(request, metadata=metadata)) for _ in range(2)]
            assert codes == [code, "RESOURCE_EXHAUSTED"]


async def outcome(call: Awaitable[Any]) -> str | None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return None
