"""Requests with `store: false`, and of tenants without `tune_log`, are kept out of the log for draft tuning."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from protos import outrider_pb2 as pb2
from protos import outrider_pb2_grpc
from router.generation.generation_service import GenerationService
from router.openai.api import build_app
from tests.router.fixtures.fake_backend import FakeBackend
from tests.router.fixtures.grpc_channel import grpc_channel
from tests.router.fixtures.key_files import api_keys

CHAT = [{"role": "user", "content": "abc"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "abc", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": CHAT, "max_tokens": 2}),
        ("/v1/responses", {"input": "abc", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": CHAT, "max_tokens": 2}),
    ],
)
async def test_a_request_says_if_it_may_be_logged(
    http: httpx.AsyncClient, backend: FakeBackend, path: str, body: dict[str, Any]
) -> None:
    for store in (True, False):
        response = await http.post(path, json={**body, "model": "fake", "store": store})
        assert response.status_code == 200, response.text
    assert [request.is_logged for request in backend.requests] == [True, False]


async def test_grpc_requests_say_it_too(service: GenerationService, backend: FakeBackend) -> None:
    async with grpc_channel(service) as channel:
        stub = outrider_pb2_grpc.GenerationStub(channel)
        await stub.Generate(pb2.GenerateRequest(prompt="abc", max_tokens=2, store=True))
        await stub.Generate(pb2.GenerateRequest(prompt="abc", max_tokens=2, store=False))
    assert [request.is_logged for request in backend.requests] == [True, False]


async def test_no_key_of_a_tenant_that_said_no_is_logged(service: GenerationService, backend: FakeBackend) -> None:
    keys = api_keys("first tenant=one", "second tenant=one tune_log=false", "third tenant=two")
    transport = httpx.ASGITransport(build_app(service, keys))
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as http:
        for key in ("first", "second", "third"):
            body = {"model": "fake", "prompt": "abc", "max_tokens": 2, "store": True}
            await http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})
    assert [request.is_logged for request in backend.requests] == [False, False, True]
