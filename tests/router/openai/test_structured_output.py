"""Constrained answers and tool calls from HTTP and gRPC down to a real engine, as the OpenAI client sees them."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal

import grpc
import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from engine.engine_core import EngineCore
from protos import outrider_pb2 as pb2
from protos import outrider_pb2_grpc
from router.config import IngressConfig, IngressLimits
from router.generation.generation_service import GenerationService
from router.metrics.ingress_metrics import IngressMetrics
from router.tokenizer.tokenizer_files import TokenizerFiles, load_tokenizer_files
from tests.router.conftest import chat_template
from tests.router.fixtures.engine_backend import EngineBackend, ngram_engine, write_model
from tests.router.fixtures.grpc_channel import grpc_channel

TEMPLATES = {
    "hermes": "{% for tool in tools or [] %}{{ tool.function.name }}: <tool_call>{% endfor %}",
    "llama": '{% for tool in tools or [] %}{{ tool.function.name }}: {"name": name, "parameters": object}{% endfor %}',
    "none": "",
}
MESSAGES = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{{ message.tool_calls | tojson if message.tool_calls }}{% endfor %}"
)
USER: list[Any] = [{"role": "user", "content": "hi"}]


class Answer(BaseModel):
    color: Literal["red", "green"]
    counts: list[Literal[1, 20]]


def tool(name: str, strict: bool | None = None, **properties: Any) -> Any:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


TOOLS = [tool("weather", city={"enum": ["Oslo", "Rome"]}), tool("add", a={"enum": [1, 2]}, b={"enum": [3]})]
STRICT_TOOLS = [tool("weather", True, city={"enum": ["Oslo", "Rome"]})]
SCHEMAS = {each["function"]["name"]: each["function"]["parameters"] for each in TOOLS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return folder


@pytest.fixture(scope="module")
def core(folder: Path) -> EngineCore:
    return ngram_engine(folder)


@pytest.fixture
def backend(core: EngineCore) -> EngineBackend:
    return EngineBackend(core)


@pytest.fixture
def format_name() -> str:
    return "hermes"


@pytest.fixture
def service(backend: EngineBackend, folder: Path, format_name: str, limits: IngressLimits) -> GenerationService:
    files = load_tokenizer_files(str(folder))
    files = TokenizerFiles(files.tokenizer, chat_template(TEMPLATES[format_name] + MESSAGES))
    return GenerationService(
        backend, files, IngressConfig(model_id="fake", model_path="nowhere", limits=limits), IngressMetrics()
    )


def prompt_of(backend: EngineBackend, service: GenerationService) -> str:
    return service.files.tokenizer.decode(backend.requests[-1].prompt_token_ids)


# ---- constrained text ---------------------------------------------------------------------------------------------


async def test_parse_gives_the_model_that_was_asked_for(client: openai.AsyncOpenAI) -> None:
    for seed in range(5):
        answer = await client.chat.completions.parse(model="fake", messages=USER, response_format=Answer, seed=seed)
        assert answer.choices[0].finish_reason == "stop"
        assert isinstance(answer.choices[0].message.parsed, Answer)


async def test_a_streamed_answer_follows_the_schema(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model="fake", messages=USER, response_format=Answer) as stream:
        answer = await stream.get_final_completion()
    assert isinstance(answer.choices[0].message.parsed, Answer)


async def test_json_object_is_an_object(client: openai.AsyncOpenAI) -> None:
    for seed in range(20):
        answer = await client.chat.completions.create(
            model="fake", messages=USER, response_format={"type": "json_object"}, seed=seed, max_tokens=200
        )
        if answer.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)
            return
    raise AssertionError("no answer came to its end")


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"guided_regex": "(ab|c){2,3}"}, "(ab|c){2,3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_json": {"enum": [12, "x"]}}, '12|"x"'),
        ({"guided_json": '{"const": 5}'}, "5"),
        ({"guided_grammar": 'start: "<" /[ab]/ ">"'}, "<[ab]>"),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, "[0-9]{3}"),
        ({"structured_outputs": {"choice": ["u", "v"]}}, "u|v"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"structured_outputs": {"grammar": 'root ::= "x" | "yz"'}}, "x|yz"),
        ({"guided_regex": "[ab]{2}", "structured_outputs": {"regex": "[ab]{2}"}}, "[ab]{2}"),
    ],
)
async def test_every_constraint_holds_in_both_endpoints(
    client: openai.AsyncOpenAI, constraint: dict[str, Any], pattern: str
) -> None:
    chat = await client.chat.completions.create(model="fake", messages=USER, n=3, extra_body=constraint)
    text = await client.completions.create(model="fake", prompt="hi", n=3, max_tokens=30, extra_body=constraint)
    assert all(re.fullmatch(pattern, choice.message.content or "") for choice in chat.choices)
    assert all(re.fullmatch(pattern, choice.text) for choice in text.choices)
    assert {choice.finish_reason for choice in text.choices} == {"stop"}


@pytest.mark.parametrize(
    ("constraint", "param", "words"),
    [
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "in"}}}},
            "response_format",
            "Invalid type: in",
        ),
        ({"guided_grammar": "start: foo"}, "guided_grammar", "foo"),
        (
            {"guided_json": {"properties": {"x": {"patternProperties": {"^a$": {}}, "minProperties": 2}}}},
            "guided_json",
            "minProperties 2 and allows any keys",
        ),
        ({"guided_regex": "a", "min_tokens": 2}, "min_tokens", "min_tokens is 2"),
        ({"guided_regex": "a", "structured_outputs": {"regex": "b"}}, "structured_outputs.regex", "both constrain"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "both constrain"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "end tokens"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_grammar_that_cannot_be_compiled_is_a_bad_request(
    client: openai.AsyncOpenAI, constraint: dict[str, Any], param: str, words: str, stream: bool
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="fake", messages=USER, stream=stream, extra_body=constraint)
    assert caught.value.param == param
    assert words in caught.value.message


# ---- gRPC ---------------------------------------------------------------------------------------------------------


@pytest.fixture
async def stub(service: GenerationService) -> AsyncIterator[outrider_pb2_grpc.GenerationStub]:
    async with grpc_channel(service) as channel:
        yield outrider_pb2_grpc.GenerationStub(channel)


SCHEMA_FORMAT = pb2.ResponseFormat(
    type="json_schema", json_schema=pb2.JsonSchemaFormat(name="x", schema='{"const": "ok"}')
)


@pytest.mark.parametrize(
    ("constraint", "pattern"),
    [
        ({"guided_regex": "(ab|c){2,3}"}, "(ab|c){2,3}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_json": '{"const": 5}'}, "5"),
        ({"guided_grammar": 'start: "<" /[ab]/ ">"'}, "<[ab]>"),
        ({"response_format": SCHEMA_FORMAT}, '"ok"'),
    ],
)
async def test_grpc_takes_every_constraint(
    stub: outrider_pb2_grpc.GenerationStub, constraint: dict[str, Any], pattern: str
) -> None:
    answer = await stub.Generate(pb2.GenerateRequest(model="fake", prompt="hi", max_tokens=30, **constraint))
    assert re.fullmatch(pattern, answer.choices[0].text)


async def test_grpc_names_a_bad_grammar(stub: outrider_pb2_grpc.GenerationStub) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(pb2.GenerateRequest(model="fake", prompt="hi", guided_regex="("))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "unclosed group" in (caught.value.details() or "")


# ---- tools --------------------------------------------------------------------------------------------------------


def check_calls(calls: Any) -> None:
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    assert len({call.id for call in calls}) == len(calls)


@pytest.mark.parametrize("format_name", ["hermes", "llama"])
async def test_a_required_call_is_valid(client: openai.AsyncOpenAI) -> None:
    for seed in range(5):
        answer = await client.chat.completions.create(
            model="fake", messages=USER, tools=TOOLS, tool_choice="required", seed=seed, parallel_tool_calls=False
        )
        choice = answer.choices[0]
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert len(choice.message.tool_calls or ()) == 1
        check_calls(choice.message.tool_calls)


@pytest.mark.parametrize("format_name", ["hermes", "llama"])
async def test_a_named_function_is_called(client: openai.AsyncOpenAI) -> None:
    named: Any = {"type": "function", "function": {"name": "add"}}
    answer = await client.chat.completions.create(model="fake", messages=USER, tools=TOOLS, tool_choice=named)
    (call,) = answer.choices[0].message.tool_calls or ()
    assert call.type == "function"
    assert call.function.name == "add"
    check_calls([call])


@pytest.mark.parametrize("format_name", ["hermes", "llama"])
async def test_calls_in_parallel_are_told_apart(client: openai.AsyncOpenAI) -> None:
    answers = [
        await client.chat.completions.create(
            model="fake", messages=USER, tools=TOOLS, tool_choice="required", seed=seed, max_tokens=300
        )
        for seed in range(4)
    ]
    calls = [a.choices[0].message.tool_calls or [] for a in answers if a.choices[0].finish_reason == "tool_calls"]
    for each in calls:
        check_calls(each)
    assert max(map(len, calls)) > 1


@pytest.mark.parametrize("format_name", ["hermes", "llama"])
async def test_a_stream_of_calls_adds_up(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="fake", messages=USER, tools=TOOLS, tool_choice="required", stream=True, parallel_tool_calls=False
    )
    chunks = [chunk async for chunk in stream]
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert deltas[0].id
    assert deltas[0].function
    assert deltas[0].function.name in SCHEMAS
    arguments = "".join(call.function.arguments or "" for call in deltas if call.function)
    jsonschema.validate(json.loads(arguments), SCHEMAS[deltas[0].function.name])
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("format_name", ["hermes", "llama"])
async def test_a_required_call_that_the_limit_cuts_is_no_content(client: openai.AsyncOpenAI) -> None:
    for max_tokens in (1, 4, 9, 16):
        answer = await client.chat.completions.create(
            model="fake", messages=USER, tools=TOOLS, tool_choice="required", seed=3, max_tokens=max_tokens
        )
        assert not answer.choices[0].message.content
        assert answer.choices[0].finish_reason == "length" or answer.choices[0].message.tool_calls


@pytest.mark.parametrize("format_name", ["hermes", "llama"])
async def test_a_required_call_has_no_text_for_a_response_format(client: openai.AsyncOpenAI) -> None:
    """Instructor names a function and asks for its arguments as `text.format` too."""
    schema = {"enum": ["a", "b"]}
    functions: Any = [{"type": "function", **each["function"]} for each in TOOLS]
    for seed in range(4):
        answer = await client.responses.create(
            model="fake",
            input="hi",
            tools=functions,
            tool_choice={"type": "function", "name": "add"},
            text={"format": {"type": "json_schema", "name": "x", "schema": schema}},
            extra_body={"seed": seed},
        )
        [call] = answer.output
        assert (call.type, call.name) == ("function_call", "add")
        jsonschema.validate(json.loads(call.arguments), SCHEMAS["add"])


async def test_an_answer_in_json_may_take_the_place_of_a_call(client: openai.AsyncOpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}
    seen = set()
    for seed in range(12):
        answer = await client.chat.completions.create(
            model="fake", messages=USER, tools=STRICT_TOOLS, response_format=schema, seed=seed
        )
        message = answer.choices[0].message
        seen.add(bool(message.tool_calls))
        if message.tool_calls:
            check_calls(message.tool_calls)
        else:
            assert json.loads(message.content or "") in ("a", "b")
    assert seen == {True, False}


async def test_the_template_sees_tools_and_their_answers(
    client: openai.AsyncOpenAI, backend: EngineBackend, service: GenerationService
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages: list[Any] = [
        *USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
    ]
    await client.chat.completions.create(model="fake", messages=messages, tools=TOOLS, max_tokens=1)
    prompt = prompt_of(backend, service)
    assert prompt.startswith("weather: <tool_call>add: <tool_call>[user]hi[assistant]")
    assert '"arguments": {"a": 1}' in prompt
    assert prompt.endswith("[tool]7")
    await client.chat.completions.create(model="fake", messages=USER, tools=TOOLS, tool_choice="none", max_tokens=1)
    assert prompt_of(backend, service) == "[user]hi"


@pytest.mark.parametrize("parse", [False, True])
async def test_an_answer_may_be_sent_back_as_it_came(
    client: openai.AsyncOpenAI, backend: EngineBackend, service: GenerationService, parse: bool
) -> None:
    ask = client.chat.completions.parse if parse else client.chat.completions.create
    answer = await ask(model="fake", messages=USER, tools=STRICT_TOOLS, tool_choice="required", seed=1)
    message = answer.choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "7"} for call in message.tool_calls]
    for form in (message, message.model_dump(), message.model_dump(exclude_none=True)):
        await client.chat.completions.create(
            model="fake", messages=[*USER, form, *results], tools=STRICT_TOOLS, max_tokens=1
        )
        prompt = prompt_of(backend, service)
        assert prompt.endswith("[tool]7")
        assert "null" not in prompt


NAMED_OTHER = {"type": "function", "function": {"name": "nothing"}}


@pytest.mark.parametrize(
    ("parameters", "param", "words"),
    [
        ({"tools": TOOLS, "tool_choice": "required", "guided_regex": "a"}, "guided_regex", "requires a call"),
        ({"tools": TOOLS, "guided_regex": "a"}, "guided_regex", "cannot be combined with tools"),
        ({"tools": TOOLS, "tool_choice": NAMED_OTHER}, "tool_choice.function.name", "weather, add"),
        ({"tools": TOOLS, "tool_choice": "must"}, "tool_choice", "'required'"),
        ({"tool_choice": "required"}, "tool_choice", "there are no tools"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "same name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
        ({"tools": [tool("f", x={"type": "nonsense"})], "tool_choice": "required"}, "tools", "nonsense"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": ["string", "null"]}}}]},
            "tools",
            "arguments are an object",
        ),
    ],
)
async def test_tools_that_contradict_are_refused(
    client: openai.AsyncOpenAI, parameters: dict[str, Any], param: str, words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model="fake", messages=USER, extra_body=parameters)
    assert caught.value.param == param
    assert words in caught.value.message


@pytest.mark.parametrize("format_name", ["none"])
async def test_a_template_without_tools_says_so(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="has no tools"):
        await client.chat.completions.create(model="fake", messages=USER, tools=TOOLS)


UUID = {
    "type": "object",
    "properties": {"id": {"type": "string", "format": "uuid4"}},
    "required": ["id"],
    "additionalProperties": False,
}
BY_API: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": lambda name: {
        "messages": USER,
        "tools": [{"type": "function", "function": {"name": name, "parameters": UUID}}],
    },
    "/v1/responses": lambda name: {"input": "hi", "tools": [{"type": "function", "name": name, "parameters": UUID}]},
    "/v1/messages": lambda name: {"messages": USER, "tools": [{"name": name, "input_schema": UUID}]},
}


@pytest.mark.parametrize("path", BY_API)
async def test_a_tool_s_name_may_have_128_characters(http: httpx.AsyncClient, path: str) -> None:
    limit = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 1}
    assert (await http.post(path, json={**BY_API[path]("a" * 128), **limit})).status_code == 200
    refused = await http.post(path, json={**BY_API[path]("a" * 129), **limit})
    assert refused.status_code == 400
    assert "128" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "sent"),
    [
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": UUID}}},
        ),
        (
            "/v1/chat/completions",
            {**BY_API["/v1/chat/completions"]("f"), "tool_choice": "required"},
        ),
        ("/v1/messages", {"output_config": {"format": {"type": "json_schema", "schema": UUID}}}),
    ],
)
async def test_a_format_that_no_grammar_knows_is_an_annotation(
    http: httpx.AsyncClient, path: str, sent: dict[str, Any]
) -> None:
    answer = await http.post(path, json={"messages": USER, "max_tokens": 4, **sent})
    assert answer.status_code == 200, answer.text


async def test_a_lone_surrogate_in_the_text_of_a_schema_is_named(http: Any) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "a", "guided_json": '{"const": "\\ud800"}'})
    assert answer.status_code == 400
    assert "surrogate" in answer.json()["error"]["message"]
