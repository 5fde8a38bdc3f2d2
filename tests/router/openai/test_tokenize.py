"""A prompt's tokens are counted as the chat that sends the same fields counts them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from protos import outrider_pb2 as pb2
from protos import outrider_pb2_grpc
from router.api_keys import ApiKeys
from router.generation.generation_service import GenerationService
from router.openai.api import build_app
from router.tokenizer.chat_template import ChatTemplate
from tests.router.conftest import chat_template
from tests.router.fixtures.fake_backend import FakeBackend, say
from tests.router.fixtures.grpc_channel import grpc_channel
from tests.router.tokenizer.published import PUBLISHED, template

PARAMETERS = {"type": "object", "properties": {"x": {"type": "string", "description": "d"}}, "required": ["x"]}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": PARAMETERS}}
    for name in ("read", "write")
]
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "read", "arguments": '{"x": "y"}'}}
MESSAGES = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "I look.", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "abcdefgh1", "content": "found"},
]
SHOWING = (
    "{{ enable_thinking }}{{ reasoning_effort }}{{ mood }}{{ documents }}{% for t in tools or [] %}"
    "<tool_call>{{ t.function.name }}{% endfor %}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def served(service: GenerationService, backend: FakeBackend, chat_template: ChatTemplate) -> GenerationService:
    backend.card, backend.next_token = replace(backend.card, max_model_len=20_000), say(0)
    files = replace(service.files, chat_template=chat_template)
    return GenerationService(backend, files, service.config, service.metrics)


def client_of(service: GenerationService) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(service, ApiKeys()))
    return httpx.AsyncClient(transport=transport, base_url="http://outrider")


async def counts(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, int]:
    counted = await http.post("/tokenize", json=body)
    assert counted.status_code == 200, counted.text
    assert "x-ignored-fields" not in counted.headers
    answer = await http.post("/v1/chat/completions", json={**body, "max_completion_tokens": 2})
    assert answer.status_code == 200, answer.text
    return counted.json()["count"], answer.json()["usage"]["prompt_tokens"]


@pytest.mark.parametrize("name", PUBLISHED)
async def test_a_chat_with_tools_is_counted_as_it_is_answered(
    service: GenerationService, backend: FakeBackend, name: str
) -> None:
    own = served(service, backend, template(name))
    tools = {"tools": TOOLS} if own._format else {}
    async with client_of(own) as http:
        counted, used = await counts(http, {"messages": MESSAGES, **tools})
        plain, _ = await counts(http, {"messages": MESSAGES})
    assert counted == used
    assert counted > plain or not tools


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS},
        {"tools": TOOLS, "tool_choice": "none"},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "read"}}},
        {"tools": TOOLS, "parallel_tool_calls": False},
        {"chat_template_kwargs": {"mood": "glad", "enable_thinking": False}},
        {"reasoning_effort": "none"},
        {"documents": [{"title": "t", "text": "d"}]},
        {"add_generation_prompt": False},
        {"continue_final_message": True, "messages": [*MESSAGES, {"role": "assistant", "content": "It"}]},
        {"add_special_tokens": True},
        {"truncate_prompt_tokens": 7},
    ],
    ids=lambda fields: "-".join(fields),
)
async def test_every_field_of_a_prompt_counts(
    service: GenerationService, backend: FakeBackend, fields: dict[str, Any]
) -> None:
    async with client_of(served(service, backend, chat_template(SHOWING))) as http:
        counted, used = await counts(http, {"messages": MESSAGES, **fields})
    assert counted == used == len(backend.requests[-1].prompt_token_ids)


async def test_a_message_is_counted_as_it_is_answered(service: GenerationService, backend: FakeBackend) -> None:
    tools = [{"name": "read", "description": "d", "input_schema": PARAMETERS}]
    body = {"system": "be brief", "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    async with client_of(served(service, backend, template("qwen3"))) as http:
        counted = (await http.post("/v1/messages/count_tokens", json=body)).json()["input_tokens"]
        usage = (await http.post("/v1/messages", json={**body, "max_tokens": 2})).json()["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]


async def test_grpc_counts_chats(service: GenerationService, backend: FakeBackend) -> None:
    fields: dict[str, Any] = {
        "messages": [pb2.ChatMessage(role="user", content="hi"), pb2.ChatMessage(role="assistant", content="It")],
        "tools": [pb2.Tool(name="read"), pb2.Tool(name="write")],
        "allowed_tools": ["read"],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning_effort": "high",
        "chat_template_kwargs": '{"mood": "glad"}',
        "continue_final_message": True,
    }
    async with grpc_channel(served(service, backend, chat_template(SHOWING))) as channel:
        stub = outrider_pb2_grpc.GenerationStub(channel)
        counted = await stub.Tokenize(pb2.TokenizeRequest(**fields))
        answer = await stub.Generate(pb2.GenerateRequest(**fields, max_tokens=2))
        assert tuple(counted.tokens) == backend.requests[-1].prompt_token_ids
        assert counted.count == answer.usage.prompt_tokens
        bare = await stub.Tokenize(pb2.TokenizeRequest(messages=fields["messages"]))
        assert bare.count < counted.count
        assert list((await stub.Tokenize(pb2.TokenizeRequest())).tokens) == []
