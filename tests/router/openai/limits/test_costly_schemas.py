"""The work for a client's schema is bounded, done once, and off the event loop; refused schemas are charged."""

from __future__ import annotations

import gzip
import json
import threading
from dataclasses import replace
from typing import Any

import grpc
import httpx
import pytest

from protos import outrider_pb2 as pb2
from protos import outrider_pb2_grpc
from router.api_keys import ApiKeys
from router.config import IngressConfig
from router.generation.generation_service import GenerationService
from router.metrics.ingress_metrics import IngressMetrics
from router.openai.api import build_app
from router.requests import json_schema
from router.tokenizer import Tokenizer
from router.tokenizer.tokenizer_files import TokenizerFiles
from tests.router.conftest import chat_template
from tests.router.fixtures.fake_backend import FakeBackend
from tests.router.fixtures.grpc_channel import grpc_channel
from tests.router.fixtures.key_files import api_keys

TEMPLATE = "{{ tools }}{{ messages[0].content }}<tool_call>"
MESSAGES = [{"role": "user", "content": "hi"}]
SMALL = {"type": "object", "properties": {"a": {"type": "integer"}}}
HI = pb2.ChatMessage(role="user", content="hi")
LISTS = {"enum": [[]] * 340_000}


def service_of(backend: FakeBackend, tokenizer: Tokenizer) -> GenerationService:
    files = TokenizerFiles(tokenizer, chat_template(TEMPLATE))
    return GenerationService(backend, files, IngressConfig(model_id="fake", model_path="nowhere"), IngressMetrics())


def client_of(backend: FakeBackend, tokenizer: Tokenizer, keys: ApiKeys | None = None) -> httpx.AsyncClient:
    app = build_app(service_of(backend, tokenizer), keys or ApiKeys())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://outrider")


def tool(parameters: object) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x", "guided_json": LISTS}, None),
        ("/v1/chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"a": [[]] * 340_000}}, None),
        ("/v1/chat/completions", {"messages": MESSAGES, "documents": [{}] * 340_000}, None),
        ("/v1/completions", {"prompt": "x", "guided_json": {"enum": [[]] * 12_000}}, "guided_json"),
        ("/v1/completions", {"prompt": "x", "guided_json": json.dumps({"enum": [[]] * 12_000})}, "guided_json"),
        ("/v1/completions", {"prompt": "x", "response_format": {"type": "json_object", "schema": LISTS}}, None),
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [tool({"enum": [[]] * 12_000})]}, "tools"),
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [tool({"enum": [1] * 99})] * 200}, "tools"),
        (
            "/v1/responses",
            {"input": "x", "text": {"format": {"type": "json_schema", "name": "a", "schema": LISTS}}},
            None,
        ),
        (
            "/v1/messages",
            {"messages": MESSAGES, "max_tokens": 1, "tools": [{"name": "f", "input_schema": {"enum": [[]] * 12_000}}]},
            "tools",
        ),
    ],
)
async def test_a_kilobyte_that_expands_to_many_parts_is_refused_by_name(
    backend: FakeBackend, tokenizer: Tokenizer, path: str, body: dict[str, Any], param: str | None
) -> None:
    packed = gzip.compress(json.dumps(body).encode())
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    async with client_of(backend, tokenizer) as http:
        answer = await http.post(path, content=packed, headers=headers)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    if param is None:
        assert message.startswith("The body holds")
    else:
        assert message.startswith(f"{param} holds more than 10000")
    assert not backend.requests


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ({"prompt": "x", "guided_json": json.dumps({"enum": [[]] * 12_000})}, "guided_json holds more than 10000"),
        ({"prompt": "x", "guided_json": json.dumps(LISTS)}, "guided_json has 1360010 characters"),
        ({"messages": [HI], "tools": [pb2.Tool(name="f", parameters=json.dumps({"enum": [[]] * 12_000}))]}, "tools"),
        ({"messages": [HI], "tools": [pb2.Tool(name="f", parameters=json.dumps(LISTS))]}, "holds"),
        ({"messages": [HI], "chat_template_kwargs": json.dumps({"a": [[]] * 340_000})}, "chat_template_kwargs holds"),
    ],
)
async def test_a_message_of_many_parts_is_refused_by_name(
    backend: FakeBackend, tokenizer: Tokenizer, sent: dict[str, Any], words: str
) -> None:
    async with grpc_channel(service_of(backend, tokenizer)) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await outrider_pb2_grpc.GenerationStub(channel).Generate(pb2.GenerateRequest(**sent), timeout=20)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in (error.value.details() or "")
    assert not backend.requests


async def test_a_schema_is_read_once_and_in_another_thread(
    backend: FakeBackend, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend.card = replace(backend.card, max_model_len=1000)
    threads: list[int] = []
    check = json_schema._refuse_no_end

    def counted(*schema: Any) -> None:
        threads.append(threading.get_ident())
        check(*schema)

    monkeypatch.setattr(json_schema, "_refuse_no_end", counted)
    chat = {"messages": MESSAGES, "max_tokens": 1, "n": 4}
    async with client_of(backend, tokenizer) as http:
        for path, body, num_schemas in (
            ("/v1/completions", {"prompt": "x", "max_tokens": 1, "n": 4, "guided_json": SMALL}, 1),
            ("/v1/chat/completions", {**chat, "guided_json": SMALL}, 1),
            ("/v1/chat/completions", {**chat, "tools": [tool(SMALL)], "tool_choice": "required"}, 1),
            ("/v1/chat/completions", {**chat, "tools": [tool(SMALL)], "guided_json": SMALL}, 2),
        ):
            threads.clear()
            answer = await http.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert len(threads) == num_schemas
            assert threading.get_ident() not in threads


async def test_refusals_count_in_the_tenant_s_rate(backend: FakeBackend, tokenizer: Tokenizer) -> None:
    keys = api_keys("bad tenant=bad tokens_per_minute=5000", "good tenant=good tokens_per_minute=5000")
    wrong = {"prompt": "x", "guided_json": {"enum": [[]] * 12_000}}
    async with client_of(backend, tokenizer, keys) as http:
        bad, good = ({"authorization": f"Bearer {key}"} for key in ("bad", "good"))
        assert (await http.post("/v1/completions", json=wrong, headers=bad)).status_code == 400
        for path, body in (("/v1/completions", wrong), ("/tokenize", {"prompt": "x"})):
            answer = await http.post(path, json=body, headers=bad)
            assert answer.status_code == 429
            assert int(answer.headers["retry-after"]) >= 1
        assert (await http.post("/v1/completions", json={"prompt": "x"}, headers=good)).status_code == 200
