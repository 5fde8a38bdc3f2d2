"""Chats and tools over gRPC: the same path as HTTP chats, in messages."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import grpc
import pytest

from protos import outrider_pb2 as pb2
from protos import outrider_pb2_grpc
from router.generation.generation_service import GenerationService
from tests.router.conftest import chat_template
from tests.router.fixtures.fake_backend import FakeBackend, say
from tests.router.fixtures.grpc_channel import grpc_channel
from tests.router.openai.test_messages import TOOL_TEMPLATE, prompt_of, spoken

ADD = pb2.Tool(name="add", description="adds", parameters='{"type": "object", "properties": {"x": {}}}')
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
HI = pb2.ChatMessage(role="user", content="hi")


@pytest.fixture
async def stub(service: GenerationService, backend: FakeBackend) -> AsyncIterator[outrider_pb2_grpc.GenerationStub]:
    files = replace(service.files, chat_template=chat_template(TOOL_TEMPLATE))
    backend.card = replace(backend.card, max_model_len=1000)
    async with grpc_channel(GenerationService(backend, files, service.config, service.metrics)) as channel:
        yield outrider_pb2_grpc.GenerationStub(channel)


async def test_a_chat_is_answered(stub: outrider_pb2_grpc.GenerationStub, backend: FakeBackend) -> None:
    backend.next_token = say(*spoken("yes"))
    messages = [
        HI,
        pb2.ChatMessage(
            role="assistant", reasoning="hm", tool_calls=[pb2.ToolCall(id="a", name="add", arguments='{"x": 5}')]
        ),
        pb2.ChatMessage(role="tool", tool_call_id="a", content="6"),
    ]
    answer = await stub.Generate(pb2.GenerateRequest(messages=messages, max_tokens=9, logprobs=2, seed=4))
    assert prompt_of(backend) == "[user]hi[assistant](hm)add5[tool]6"
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason, len(choice.logprobs)) == ("yes", "stop", 4)
    assert len(choice.logprobs[0].top) == 2
    assert answer.usage.completion_tokens == 4
    assert answer.id.startswith("chatcmpl")


async def test_calls_come_whole_and_in_pieces(stub: outrider_pb2_grpc.GenerationStub, backend: FakeBackend) -> None:
    backend.next_token = say(*spoken(f"so {CALL}"))
    request = pb2.GenerateRequest(messages=[HI], tools=[ADD], max_tokens=200)
    [choice] = (await stub.Generate(request)).choices
    assert (choice.text.strip(), choice.finish_reason) == ("so", "tool_calls")
    assert [(call.name, call.arguments) for call in choice.tool_calls] == [("add", '{"x": 1}')]
    chunks = [chunk async for chunk in stub.GenerateStream(request)]
    deltas = [delta for chunk in chunks for delta in chunk.tool_calls]
    assert (deltas[0].name, bool(deltas[0].id)) == ("add", True)
    assert "".join(delta.arguments for delta in deltas) == '{"x": 1}'
    assert "".join(chunk.text for chunk in chunks).strip() == "so"
    assert chunks[-1].finish_reason == "tool_calls"
    assert chunks[-1].usage.completion_tokens == len(spoken(f"so {CALL}"))


async def test_tools_and_formats_constrain_the_answer(
    stub: outrider_pb2_grpc.GenerationStub, backend: FakeBackend
) -> None:
    other = pb2.Tool(name="other")
    await stub.Generate(
        pb2.GenerateRequest(
            messages=[HI], tools=[ADD, other], tool_choice="required", allowed_tools=["add"], max_tokens=2
        )
    )
    assert prompt_of(backend).startswith("2 <tool_call>")
    assert "add" in backend.requests[-1].sampling.grammar.source
    assert "other" not in backend.requests[-1].sampling.grammar.source
    schema = pb2.JsonSchemaFormat(name="a", schema='{"type": "integer"}')
    as_json = pb2.ResponseFormat(type="json_schema", json_schema=schema)
    await stub.Generate(pb2.GenerateRequest(messages=[HI], response_format=as_json, max_tokens=2))
    assert "integer" in backend.requests[-1].sampling.grammar.source


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": "a"}, "prompt"),
        ({"echo": True}, "echo"),
        ({"tool_choice": "add"}, "tool_choice"),
        ({"allowed_tools": ["sub"], "tools": [ADD]}, "sub"),
        ({"tools": [pb2.Tool(name="add", parameters="{")]}, "not JSON"),
        ({"tools": [pb2.Tool(name="no name")]}, "name"),
        ({"chat_template_kwargs": "[1"}, "not JSON"),
        ({"messages": [pb2.ChatMessage(role="owner", content="a")]}, "role"),
    ],
)
async def test_bad_chats_are_refused_by_name(stub: outrider_pb2_grpc.GenerationStub, fields: dict, said: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Generate(pb2.GenerateRequest(**{"messages": [HI], "max_tokens": 2, **fields}))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert said in refused.value.details()
