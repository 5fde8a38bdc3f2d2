"""`/v1/responses`, through OpenAI's own client."""

from __future__ import annotations

import httpx
import openai
import pytest

from router.generation.generation_service import GenerationService
from tests.router.fixtures.fake_backend import FakeBackend, say
from tests.router.openai.test_messages import prompt_of, spoken
from tests.router.openai.test_messages import service as service

TOOLS = [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}]
FORMAT = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'


async def test_a_turn_is_answered(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    backend.next_token = say(*spoken("yes"))
    answer = await client.responses.create(model="fake", input="hi", instructions="be brief")
    assert prompt_of(backend) == "[system]be brief[user]hi"
    assert (answer.output_text, answer.status, answer.store) == ("yes", "completed", False)
    assert (answer.usage.output_tokens, answer.usage.input_tokens_details.cached_tokens) == (4, 1)


async def test_the_limit_makes_it_incomplete(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    backend.next_token = say(*spoken("yes"))
    answer = await client.responses.create(model="fake", input="hi", max_output_tokens=2)
    assert (answer.output_text, answer.status) == ("ye", "incomplete")
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert [item.status for item in answer.output] == ["incomplete"]


@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
async def test_a_stream_adds_up_to_the_response(
    client: openai.AsyncOpenAI, backend: FakeBackend, tokens_per_step: int
) -> None:
    backend.next_token = say(*spoken("I add." + CALL + CALL))
    backend.tokens_per_step = tokens_per_step
    stream = await client.responses.create(model="fake", input="hi", tools=TOOLS, stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events][:2] == ["response.created", "response.in_progress"]
    last = events[-1]
    assert last.type == "response.completed"
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text == last.response.output_text == "I add."
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert done == last.response.output
    assert [(item.name, item.arguments) for item in done[1:]] == [("add", '{"x": 1}')] * 2
    whole = await client.responses.create(model="fake", input="hi", tools=TOOLS)
    assert [item.type for item in whole.output] == [item.type for item in done]
    assert whole.usage == last.response.usage


@pytest.mark.parametrize("fields", [{"include": ["message.output_text.logprobs"]}, {"top_logprobs": 2}])
@pytest.mark.parametrize("tokens_per_step", [1, 3, 100])
async def test_logprobs_come_with_their_text(
    client: openai.AsyncOpenAI, backend: FakeBackend, fields: dict, tokens_per_step: int
) -> None:
    backend.next_token = say(*spoken("I ädd." + CALL))
    backend.tokens_per_step = tokens_per_step
    options = {"model": "fake", "input": "hi", "tools": TOOLS, **fields}
    events = [event async for event in await client.responses.create(**options, stream=True)]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    [part] = events[-1].response.output[0].content
    named = [position.token for event in deltas for position in event.logprobs]
    assert named == [position.token for position in done.logprobs] == [position.token for position in part.logprobs]
    assert "".join(named[:3]) == "I bytes:\\xc3"
    assert {len(position.top_logprobs) for position in part.logprobs} == {fields.get("top_logprobs", 0)}
    whole = await client.responses.create(**options)
    assert whole.output[0].content[0].logprobs == part.logprobs
    plain = await client.responses.create(**options | {"include": None, "top_logprobs": None})
    assert plain.output[0].content[0].logprobs == []


async def test_a_cut_that_is_not_made_is_named(http: httpx.AsyncClient) -> None:
    for truncation, named in (("auto", "truncation"), ("disabled", None)):
        answer = await http.post("/v1/responses", json={"input": "hi", "truncation": truncation})
        assert answer.headers.get("x-ignored-fields") == named


async def test_a_conversation_with_calls_is_replayed(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    backend.next_token = say(0)
    items = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "rs", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"x": 7}'},
        {"type": "function_call_output", "call_id": "c1", "output": "8"},
    ]
    await client.responses.create(model="fake", input=items, tools=TOOLS)
    assert prompt_of(backend) == "1 <tool_call>[system]be brief[user]hi[assistant]so(hm)add7[tool]8"


async def test_the_format_of_the_text_is_a_grammar(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    backend.next_token = say(0)
    await client.responses.create(model="fake", input="hi", text={"format": FORMAT})
    assert backend.requests[-1].sampling.grammar is not None


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "keeps none"),
        ({"conversation": "conv_1"}, "conversation", "keeps none"),
        ({"background": True}, "background", "keeps none"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content.0", "input_image"),
        ({"input": 5}, "input", "list of items"),
        ({"text": {"format": {"type": "xml"}}}, "text.format", "json_schema"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "sub"}}, "tool_choice.function.name", "'sub'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tool_choice": 5}, "tool_choice", "'required'"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens is 0"),
        ({"input": "hi " * 400}, "input", "your messages resulted in"),
        ({"instructions": "s", "input": [{"role": "critic", "content": ""}]}, "input[0].role", "input[0].role is 'cri"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {}}}},
            "text.format.name",
            "parameter: text.format.name.",
        ),
        ({"text": {"format": {**FORMAT, "schema": 5}}}, "text.format", "text.format is not a JSON schema"),
        ({"tools": [{**TOOLS[0], "name": "a b"}]}, "tools.0.name", "tools.0.name is 'a b'"),
        ({"top_logprobs": 21}, "top_logprobs", "at most 20"),
    ],
)
async def test_bad_turns_are_refused(http: httpx.AsyncClient, change: dict, param: str, words: str) -> None:
    answer = await http.post("/v1/responses", json={"input": "hi", **change})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert words in answer.json()["error"]["message"]


async def test_a_stream_that_breaks_ends_as_failed(
    client: openai.AsyncOpenAI, backend: FakeBackend, service: GenerationService
) -> None:
    backend.failures = [RuntimeError("secret path")]
    backend.fail_after = 4
    stream = await client.responses.create(model="fake", input="hi", stream=True)
    *_, last = [event async for event in stream]
    assert last.type == "response.failed"
    assert "secret" not in last.response.error.message
