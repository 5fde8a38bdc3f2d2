"""`/v1/messages`, through Anthropic's own client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import anthropic
import httpx
import pytest

from protos.errors import OverloadedError
from router.generation.generation_service import GenerationService
from tests.router.conftest import chat_template
from tests.router.fixtures.fake_backend import FakeBackend, say

TOOL_TEMPLATE = (
    "{% if tools %}{{ tools | length }} <tool_call>{% endif %}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.reasoning %}({{ m.reasoning }}){% endif %}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
)
TOOLS = [{"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {"x": {}}}}]
HI = [{"role": "user", "content": "hi"}]


def spoken(text: str) -> list[int]:
    return [byte + 1 for byte in text.encode()] + [0]


def prompt_of(backend: FakeBackend) -> str:
    return bytes(token_id - 1 for token_id in backend.requests[-1].prompt_token_ids).decode()


@pytest.fixture
def service(service: GenerationService, backend: FakeBackend) -> GenerationService:
    files = replace(service.files, chat_template=chat_template(TOOL_TEMPLATE))
    backend.card = replace(backend.card, max_model_len=1000)
    return GenerationService(backend, files, service.config, service.metrics)


@pytest.fixture
async def claude(base_url: str) -> AsyncIterator[anthropic.AsyncAnthropic]:
    transport = anthropic.DefaultAsyncHttpxClient(verify=False)
    async with anthropic.AsyncAnthropic(
        base_url=base_url.removesuffix("/v1"),
        api_key="none",
        max_retries=0,
        http_client=transport,
        _strict_response_validation=True,
    ) as client:
        yield client


async def test_a_turn_is_answered(claude: anthropic.AsyncAnthropic, backend: FakeBackend) -> None:
    backend.next_token = say(*spoken("yes"))
    system = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]
    answer = await claude.messages.create(model="fake", max_tokens=20, system=system, messages=HI)
    assert prompt_of(backend) == "[system]be brief[user]hi"
    assert (answer.role, answer.stop_reason, answer.model) == ("assistant", "end_turn", "fake")
    assert [block.text for block in answer.content] == ["yes"]
    assert answer.usage.input_tokens + answer.usage.cache_read_input_tokens == len(prompt_of(backend))
    assert answer.usage.output_tokens == 4


@pytest.mark.parametrize(
    ("fields", "reason", "stop"),
    [({"max_tokens": 2}, "max_tokens", None), ({"max_tokens": 9, "stop_sequences": ["s"]}, "stop_sequence", "s")],
)
async def test_the_stop_reason_is_anthropic_s(
    claude: anthropic.AsyncAnthropic, backend: FakeBackend, fields: dict, reason: str, stop: str | None
) -> None:
    backend.next_token = say(*spoken("yes"))
    answer = await claude.messages.create(model="fake", messages=HI, **fields)
    assert (answer.content[0].text, answer.stop_reason, answer.stop_sequence) == ("ye", reason, stop)


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
async def test_a_stream_adds_up_to_the_message(
    claude: anthropic.AsyncAnthropic, backend: FakeBackend, tokens_per_step: int
) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
    backend.next_token = say(*spoken("I add." + call + call))
    backend.tokens_per_step = tokens_per_step
    async with claude.messages.stream(model="fake", max_tokens=200, messages=HI, tools=TOOLS) as stream:
        kinds = [event.type async for event in stream]
        message = await stream.get_final_message()
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3
    assert message.content[0].text == "I add."
    assert [(block.name, block.input) for block in message.content[1:]] == [("add", {"x": 1})] * 2
    assert message.stop_reason == "tool_use"
    whole = await claude.messages.create(model="fake", max_tokens=200, messages=HI, tools=TOOLS)
    assert [block.model_dump(exclude={"id"}) for block in whole.content] == [
        block.model_dump(exclude={"id", "parsed_output"}) for block in message.content
    ]
    assert whole.usage.output_tokens == message.usage.output_tokens


async def test_a_conversation_with_calls_is_replayed(claude: anthropic.AsyncAnthropic, backend: FakeBackend) -> None:
    backend.next_token = say(0)
    use = {"type": "tool_use", "id": "t1", "name": "add", "input": {"x": 7}}
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "8"}]}
    messages = [
        *HI,
        {"role": "assistant", "content": [thought, {"type": "text", "text": "so"}, use]},
        {"role": "user", "content": [result, {"type": "text", "text": "and?"}]},
        {"role": "assistant", "content": "It is"},
    ]
    answer = await claude.messages.create(model="fake", max_tokens=2, messages=messages, tools=TOOLS)
    assert answer.content == []
    assert prompt_of(backend) == "1 <tool_call>[user]hi[assistant]so(hm)add7[tool]8[user]and?[assistant]It is"


@pytest.mark.parametrize("begun", ["", " \n", []])
async def test_an_answer_begun_with_nothing_is_no_turn(
    http: httpx.AsyncClient, backend: FakeBackend, begun: object
) -> None:
    body = {"max_tokens": 2, "messages": [*HI, {"role": "assistant", "content": begun}]}
    answer = await http.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    assert prompt_of(backend) == "[user]hi"
    alone = await http.post("/v1/messages", json={**body, "messages": body["messages"][1:]})
    assert "messages have no content" in alone.json()["error"]["message"]


async def test_tokens_are_counted_as_generation_would(claude: anthropic.AsyncAnthropic) -> None:
    counted = await claude.messages.count_tokens(model="fake", messages=HI, tools=TOOLS)
    assert counted.input_tokens == len("1 <tool_call>[user]hi")


@pytest.mark.parametrize(
    ("choice", "start"),
    [({"type": "any"}, 'start: "<tool'), ({"type": "tool", "name": "add"}, 'start: "<tool'), ({"type": "auto"}, None)],
)
async def test_the_tool_choice_is_a_grammar(
    claude: anthropic.AsyncAnthropic, backend: FakeBackend, choice: dict, start: str | None
) -> None:
    backend.next_token = say(0)
    await claude.messages.create(model="fake", max_tokens=2, messages=HI, tools=TOOLS, tool_choice=choice)
    grammar = backend.requests[-1].sampling.grammar
    assert grammar is None if start is None else start in grammar.source


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"temperature": 9.0}, "temperature"),
        ({"tool_choice": {"type": "some"}, "tools": TOOLS}, "some"),
        ({"tools": [{"input_schema": {}}]}, "name"),
        ({"messages": [{"role": "user", "content": []}]}, "no content"),
        ({"messages": [{"role": "user", "content": [{"type": "redacted_thinking"}]}]}, "no content"),
        ({"tool_choice": {"type": []}, "tools": TOOLS}, "tool_choice is []"),
        ({"tool_choice": {"type": "any"}}, "there are no tools"),
        ({"thinking": {"type": 5}}, "thinking is 5"),
        ({"output_config": {"format": {"type": "json_object"}}}, "json_schema"),
        ({"output_config": {"format": 5}}, "json_schema"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": 5}}},
            "output_config.format is not a JSON schema",
        ),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences is ["),
        ({"stop_sequences": ["a" * 1025]}, "stop_sequences.0 is 'a"),
        ({"system": "s", "messages": [{"role": "critic", "content": "x"}]}, "messages.0.role is 'critic'"),
        ({"tools": [{"name": "a b"}]}, "tools.0.name is 'a b'"),
        ({"tools": [{"name": "a", "input_schema": 5}]}, "tools.0.input_schema is 5"),
    ],
)
async def test_errors_have_anthropic_s_shape(http: httpx.AsyncClient, change: dict, words: str) -> None:
    answer = await http.post("/v1/messages", json={"model": "fake", "max_tokens": 5, "messages": HI, **change})
    assert answer.status_code == 400
    assert set(answer.json()) == {"type", "error"}
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert words in answer.json()["error"]["message"]


async def test_errors_are_anthropic_s_exceptions(claude: anthropic.AsyncAnthropic, backend: FakeBackend) -> None:
    with pytest.raises(anthropic.NotFoundError):
        await claude.messages.create(model="other", max_tokens=2, messages=HI)
    backend.failures = [OverloadedError("busy", retry_after_s=2)]
    with pytest.raises(anthropic.InternalServerError, match="503") as caught:
        await claude.messages.create(model="fake", max_tokens=2, messages=HI)
    assert caught.value.response.headers["retry-after"] == "2"


async def test_tools_of_anthropic_s_servers_are_named_and_not_offered(http: httpx.AsyncClient) -> None:
    tools = [*TOOLS, {"type": "web_search_20250305", "name": "web_search"}]
    answer = await http.post("/v1/messages", json={"max_tokens": 2, "messages": HI, "tools": tools})
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-ignored-fields"] == "tools.1"
