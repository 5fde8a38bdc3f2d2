"""Every field of a request arrives where it is used.

Each mapping is compared whole, with every field at something other than its default. A field that is new in a schema
fails here until it is in one of the lists, and one in the lists that changes nothing fails too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import Any

import httpx
import pytest
from tokenizers.processors import TemplateProcessing

from protos import outrider_pb2 as pb2
from protos.messages import GenerateRequest, Grammar, GrammarKind, SamplingParams, SpeculationParams, VerifyMode
from router.api_keys import current_client, digest
from router.generation.generation_service import GenerationService
from router.grpc_api.messages import request_fields, tokenize_fields
from router.openai.messages_request import MessagesRequest
from router.openai.responses_request import ResponsesRequest
from router.requests.chat_request import ChatCompletionRequest
from router.requests.completion_request import CompletionRequest, TokenizeRequest
from router.tokenizer import Tokenizer
from router.tokenizer.tokenizer_files import TokenizerFiles
from tests.router.conftest import byte_tokenizer_core, chat_template
from tests.router.fixtures.fake_backend import FakeBackend, say

Fields = dict[str, Any]
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
FUNCTION = {"name": "add", "description": "adds", "parameters": SCHEMA, "strict": True}
SPECULATION = {"enabled": True, "num_tokens": 3, "verify": "coupled", "method": "ngram", "explain": True}

RESPONSES: Fields = {
    "receipt": True,
    "model": "fake",
    "input": [{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
    "instructions": "be brief",
    "max_output_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.75,
    "stream": True,
    "tools": [{"type": "function", **FUNCTION}, {"type": "web_search"}],
    "tool_choice": {"type": "function", "name": "add"},
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "n", "description": "d", "schema": SCHEMA, "strict": True}},
    "user": "me",
    "prompt_cache_key": "key",
    "top_logprobs": 3,
    "store": False,
    "seed": 5,
    "cache_salt": "salt",
    "speculation": SPECULATION,
}
# Of the answer alone, or of nothing; the last four are refused.
RESPONSES_ELSEWHERE = {"stream_options", "metadata", "safety_identifier", "service_tier", "truncation", "include"} | {
    "previous_response_id",
    "conversation",
    "background",
    "prompt",
}
MESSAGES: Fields = {
    "receipt": True,
    "model": "fake",
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So"}],
    "max_tokens": 7,
    "system": [{"type": "text", "text": "be brief"}],
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 4,
    "stop_sequences": ["end"],
    "stream": True,
    "tools": [
        {"name": "add", "description": "adds", "input_schema": SCHEMA, "strict": True},
        {"type": "web_search_20250305", "name": "web_search"},
    ],
    "tool_choice": {"type": "tool", "name": "add", "disable_parallel_tool_use": True},
    "thinking": {"type": "disabled"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
    "metadata": {"user_id": "me"},
    "seed": 5,
    "cache_salt": "salt",
    "store": False,
    "speculation": SPECULATION,
}
MESSAGES_ELSEWHERE = {"cache_control", "service_tier"}
TURN: Fields = {
    "receipt": True,
    "model": "fake",
    "max_tokens": 7,
    "temperature": 0.5,
    "top_p": 0.75,
    "stream": True,
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {"type": "function", "function": {"name": "add"}},
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
    "user": "me",
    "store": False,
    "seed": 5,
    "cache_salt": "salt",
    "speculation": SPECULATION,
}
SYSTEM, HI = {"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}
TURNS: list[tuple[Any, Fields, set[str], Fields, Fields]] = [
    (
        ResponsesRequest,
        RESPONSES,
        RESPONSES_ELSEWHERE,
        TURN
        | {
            "messages": [SYSTEM, HI],
            "prompt_cache_key": "key",
            "logprobs": True,
            "top_logprobs": 3,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "n", "description": "d", "schema": SCHEMA, "strict": True},
            },
        },
        {"text": {"format": {"type": "text"}}},
    ),
    (
        MessagesRequest,
        MESSAGES,
        MESSAGES_ELSEWHERE,
        TURN
        | {
            "messages": [SYSTEM, HI, {"role": "assistant", "content": "So"}],
            "continue_final_message": True,
            "top_k": 4,
            "stop": ["end"],
            "chat_template_kwargs": {"enable_thinking": False},
            "response_format": {"type": "json_schema", "json_schema": {"name": "output", "schema": SCHEMA}},
        },
        {"output_config": {"effort": "low"}},
    ),
]


def said(schema: Any, body: Fields) -> Fields:
    """The chat that a turn of another API is, before a chat's own rules are applied: tools exclude a format there."""
    turn = schema.model_validate(body).to_chat()
    assert turn.foreign_tools == (["tools.1"] if "tools" in body else [])
    set_ = {name: value for name, value in turn.fields.items() if value is not None}
    return {**set_, "messages": turn.messages}


@pytest.mark.parametrize(("schema", "body", "elsewhere", "wanted", "without_format"), TURNS)
def test_a_turn_of_another_api_becomes_the_chat_with_the_same_fields(
    schema: Any, body: Fields, elsewhere: set[str], wanted: Fields, without_format: Fields
) -> None:
    assert body.keys() | elsewhere == schema.model_fields.keys()
    chat = said(schema, body)
    with_texts = [{**message, "content": _text(message["content"])} for message in chat["messages"]]
    assert {**chat, "messages": with_texts} == wanted
    whole = schema.model_validate(body | without_format).to_chat().chat_request()
    dumped = whole.model_dump(mode="json", exclude_unset=True, by_alias=True)
    assert dumped == {name: value for name, value in wanted.items() if name != "response_format"}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


@pytest.mark.parametrize(
    ("schema", "body", "name"),
    [(schema, body, name) for schema, body, *_ in TURNS for name in body if name not in ("input", "messages")],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_field_of_a_turn_changes_the_chat(schema: Any, body: Fields, name: str) -> None:
    assert said(schema, {key: value for key, value in body.items() if key != name}) != said(schema, body)


# Of both endpoints; the regular expression represents all constraints.
GENERATION: Fields = {
    "model": "fake",
    "n": 2,
    "seed": 7,
    "temperature": 0.5,
    "top_p": 0.75,
    "top_k": 5,
    "min_p": 0.125,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.25,
    "frequency_penalty": -0.25,
    "logit_bias": {"3": 1.5},
    "bad_words": ["no"],
    "stop_token_ids": [9],
    "ignore_eos": True,
    "min_tokens": 2,
    "guided_regex": "a+",
    "truncate_prompt_tokens": 15,
    "prompt_logprobs": 2,
    "return_token_sources": True,
    "cache_salt": "salt",
    "priority": 3,
    "timeout_s": 500.0,
    "speculation": SPECULATION,
    "prediction": {"type": "content", "content": "so"},
    "prompt_cache_key": "key",
    "store": False,
}
CHAT: Fields = {
    **GENERATION,
    "messages": [{"role": "user", "content": "hi there"}],
    "max_tokens": 6,
    "logprobs": True,
    "top_logprobs": 3,
    "add_generation_prompt": False,
    "add_special_tokens": True,
    "documents": [{"text": "d"}],
    "chat_template_kwargs": {"mood": "glad"},
    "reasoning_effort": "low",
}
COMPLETION: Fields = {
    **GENERATION,
    "prompt": "this is a prompt",
    "max_tokens": 6,
    "logprobs": 3,
    "add_special_tokens": False,
}
# Fields that exclude one of those above, or another value of them, and change the sequences too.
VARIANTS: list[Fields] = [
    {"guided_regex": None, "response_format": {"type": "json_object"}},
    {"guided_regex": None, "guided_json": SCHEMA},
    {"guided_regex": None, "guided_choice": ["a", "b"]},
    {"guided_regex": None, "guided_grammar": 'start: "a"'},
    {"guided_regex": None, "structured_outputs": {"regex": "b+"}},
    {"guided_regex": None, "allowed_token_ids": [5]},
    {"prompt_logprobs": None, "stream": True, "stream_options": {"include_drafts": True}},
    {"prompt_cache_key": None, "user": "me"},
]
CHAT_VARIANTS: list[Fields] = [
    *VARIANTS,
    {"max_tokens": None, "max_completion_tokens": 5},
    {
        "add_generation_prompt": None,
        "continue_final_message": True,
        "messages": [HI, {"role": "assistant", "content": "S"}],
    },
    {"guided_regex": None, "tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    {"guided_regex": None, "tools": [{"type": "function", "function": FUNCTION}], "parallel_tool_calls": False},
]
COMPLETION_VARIANTS: list[Fields] = [*VARIANTS, {"echo": True, "prompt_logprobs": None}]
# Of the answer alone, read from `GenerateParams.fields`, and tested there.
ANSWER = {"stop", "skip_special_tokens", "include_stop_str_in_output", "return_token_ids", "include_reasoning"} | {
    "receipt"
}
NOTHING = {"metadata", "service_tier", "safety_identifier", "prompt_cache_retention", "prompt_cache_options"}
REFUSED = {
    "logits_processors",
    "use_beam_search",
    "functions",
    "function_call",
    "audio",
    "modalities",
    "moderation",
} | {
    "web_search_options",
    "chat_template",
    "suffix",
    "best_of",
}
SHOWING = (
    "{{ reasoning_effort }}{{ mood }}{{ documents | length if documents }}{% for t in tools or [] %}<tool_call>"
    "{{ t.function.name }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[go]{% endif %}"
)
ENDPOINTS: list[tuple[str, Any, Fields, list[Fields]]] = [
    ("/v1/chat/completions", ChatCompletionRequest, CHAT, CHAT_VARIANTS),
    ("/v1/completions", CompletionRequest, COMPLETION, COMPLETION_VARIANTS),
]


@pytest.fixture
def service(service: GenerationService, backend: FakeBackend) -> GenerationService:
    backend.next_token = say(2)
    core = byte_tokenizer_core()
    core.post_processor = TemplateProcessing(single="$A <|end|>", special_tokens=[("<|end|>", 0)])
    files = TokenizerFiles(Tokenizer(core), chat_template(SHOWING))
    return GenerationService(backend, files, service.config, service.metrics)


async def sequences(http: httpx.AsyncClient, backend: FakeBackend, path: str, body: Fields) -> list[GenerateRequest]:
    """The sequences that a body becomes, without the id that differs each time, and the time that has passed."""
    backend.requests.clear()
    answer = await http.post(path, json={name: value for name, value in body.items() if value is not None})
    assert answer.status_code == 200, answer.text
    made = sorted(backend.requests, key=lambda each: each.sample_index)
    return [replace(each, request_id="", timeout_s=each.timeout_s and round(each.timeout_s, -2)) for each in made]


def wanted_sequence(prompt: Sequence[int], sample: int) -> GenerateRequest:
    client = current_client.get()
    return GenerateRequest(
        request_id="",
        prompt_token_ids=tuple(prompt[-15:]),
        sampling=SamplingParams(
            seed=7,
            temperature=0.5,
            top_k=5,
            top_p=0.75,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=0.25,
            frequency_penalty=-0.25,
            logit_bias=((3, 1.5),),
            bad_words=(_ids("no"), _ids(" no")),
            stop_token_ids=(9,),
            min_tokens=2,
            max_tokens=6,
            num_logprobs=3,
            num_prompt_logprobs=2,
            grammar=Grammar(GrammarKind.REGEX, "a+", "guided_regex"),
        ),
        speculation=SpeculationParams(
            enabled=True, num_tokens=3, verify=VerifyMode.COUPLED, method="ngram", explain=True
        ),
        sample_index=sample,
        priority=3,
        timeout_s=500.0,
        cache_salt=client.secret("salt"),
        prediction_token_ids=_ids("so"),
        session_id=digest(client.secret("key")),
        is_seeded=True,
        returns_sources=True,
        num_places=2 if sample == 0 else 1,
        is_admitted=sample > 0,
        model_version="v1",
        is_logged=False,
    )


def _ids(text: str) -> tuple[int, ...]:
    return tuple(byte + 1 for byte in text.encode())


@pytest.mark.parametrize(
    ("path", "body", "prompt"),
    [
        ("/v1/chat/completions", CHAT, (*_ids("lowglad1hi there"), 0)),
        ("/v1/completions", COMPLETION, _ids("this is a prompt")),
    ],
)
async def test_a_body_becomes_sequences_with_all_its_fields(
    http: httpx.AsyncClient, backend: FakeBackend, path: str, body: Fields, prompt: Sequence[int]
) -> None:
    assert await sequences(http, backend, path, body) == [wanted_sequence(prompt, each) for each in (0, 1)]


def test_no_field_of_that_sequence_is_at_its_default_by_accident() -> None:
    first, second = wanted_sequence([1], 0), wanted_sequence([1], 1)
    same = _at_default(first, GenerateRequest("", ())) & _at_default(second, GenerateRequest("", ()))
    # Approximate steps exclude exact ones; the rest is set by migration, tracing, keys, or the feed of tokens.
    assert same == {"request_id", "output_token_ids", "is_moved", "is_traced", "feed_address"} | {
        "tenant",
        "weight",
        "is_logged",
        "returns_drafts",
    }
    assert _at_default(first.sampling, SamplingParams()) == set()
    assert _at_default(first.speculation, SpeculationParams()) == {"enabled", "is_approximate", "threshold"}


def _at_default(value: Any, default: Any) -> set[str]:
    return {each.name for each in dataclass_fields(value) if getattr(value, each.name) == getattr(default, each.name)}


@pytest.mark.parametrize(("path", "schema", "body", "variants"), ENDPOINTS)
async def test_every_field_of_a_body_changes_the_sequences(
    http: httpx.AsyncClient, backend: FakeBackend, path: str, schema: Any, body: Fields, variants: list[Fields]
) -> None:
    varied = {name for variant in variants for name in variant}
    assert (
        schema.model_fields.keys() == (body.keys() | varied | ANSWER | NOTHING | REFUSED) & schema.model_fields.keys()
    )
    assert body.keys() | varied <= schema.model_fields.keys()
    needed = {"model", "messages", "prompt", "store"} | ({"logprobs"} if path.endswith("chat/completions") else set())
    whole = await sequences(http, backend, path, body)
    changes = [{"store": True}, *({name: None} for name in body.keys() - needed), *variants]
    for change in changes:
        assert await sequences(http, backend, path, body | change) != whole, change


GRPC = pb2.GenerateRequest(
    model="fake",
    max_tokens=6,
    min_tokens=2,
    n=2,
    seed=7,
    temperature=0.5,
    top_p=0.75,
    top_k=5,
    min_p=0.125,
    repetition_penalty=1.5,
    presence_penalty=0.25,
    frequency_penalty=-0.25,
    logit_bias={3: 1.5},
    bad_words=["no"],
    stop=["end"],
    stop_token_ids=[9],
    ignore_eos=True,
    echo=True,
    logprobs=3,
    skip_special_tokens=False,
    return_token_ids=False,
    speculation=pb2.Speculation(
        enabled=True, num_tokens=3, verify="coupled", method="ngram", mode="exact", threshold=5, explain=True
    ),
    cache_salt="salt",
    priority=3,
    timeout_s=500.0,
    user="me",
    return_token_sources=True,
    receipt=True,
    include_drafts=True,
    prediction="so",
    store=False,
    response_format=pb2.ResponseFormat(
        type="json_schema", json_schema=pb2.JsonSchemaFormat(name="n", description="d", schema="{}", strict=True)
    ),
    guided_json="{}",
    guided_regex="a+",
    guided_choice=["a"],
    guided_grammar="g",
)
GRPC_CHAT: Fields = {
    "messages": [
        pb2.ChatMessage(
            role="assistant",
            content="hi",
            tool_calls=[pb2.ToolCall(id="c", name="add", arguments="{}")],
            tool_call_id="t",
            reasoning="hm",
            name="n",
        )
    ],
    "tools": [pb2.Tool(name="add", description="adds", parameters='{"type": "object"}', strict=True)],
    "tool_choice": "required",
    "allowed_tools": ["add"],
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
    "chat_template_kwargs": '{"mood": "glad"}',
    "continue_final_message": True,
}
GRPC_FIELDS: Fields = {
    **{name: value for name, value in GENERATION.items() if name not in ("truncate_prompt_tokens", "prompt_logprobs")},
    "max_tokens": 6,
    "stop": ["end"],
    "echo": True,
    "logprobs": 3,
    "skip_special_tokens": False,
    "return_token_ids": False,
    "receipt": True,
    "speculation": {**SPECULATION, "mode": "exact", "threshold": 5},
    "user": "me",
    "stream": True,
    "stream_options": {"include_drafts": True},
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "n", "description": "d", "schema": "{}", "strict": True},
    },
    "guided_json": "{}",
    "guided_choice": ["a"],
    "guided_grammar": "g",
}
GRPC_FIELDS.pop("prompt_cache_key")
GRPC_CHAT_FIELDS: Fields = {
    "messages": [
        {
            "role": "assistant",
            "content": "hi",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
            "tool_call_id": "t",
            "reasoning": "hm",
            "name": "n",
        }
    ],
    "tools": [
        {
            "type": "function",
            "function": {"name": "add", "description": "adds", "parameters": {"type": "object"}, "strict": True},
        }
    ],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "add"}}]},
    },
    "parallel_tool_calls": False,
    "reasoning_effort": "low",
    "chat_template_kwargs": {"mood": "glad"},
    "continue_final_message": True,
}
PROMPTS = {"prompt", "prompt_token_ids"}


def _names(message: Any) -> set[str]:
    return {descriptor.name for descriptor, _ in message.ListFields()}


def test_a_grpc_completion_has_the_fields_of_the_http_one() -> None:
    request = pb2.GenerateRequest(prompt_token_ids=[1, 2])
    request.MergeFrom(GRPC)
    every = {field.name for field in pb2.GenerateRequest.DESCRIPTOR.fields}
    assert _names(request) | GRPC_CHAT.keys() | PROMPTS == every
    assert request_fields(request) == GRPC_FIELDS | {"prompt": [1, 2]}
    assert request_fields(pb2.GenerateRequest(prompt="hi")) == {"prompt": "hi"}
    assert GRPC_FIELDS.keys() <= CompletionRequest.model_fields.keys()


def test_a_grpc_chat_has_the_fields_of_the_http_one() -> None:
    request = pb2.GenerateRequest(**GRPC_CHAT)
    request.MergeFrom(GRPC)
    every = {field.name for field in pb2.GenerateRequest.DESCRIPTOR.fields}
    assert _names(request) | PROMPTS == every
    for part in (request.messages[0], request.messages[0].tool_calls[0], request.tools[0], request.speculation):
        assert _names(part) == {field.name for field in part.DESCRIPTOR.fields}
    assert request_fields(request) == GRPC_FIELDS | GRPC_CHAT_FIELDS | {"logprobs": True, "top_logprobs": 3}
    assert (GRPC_FIELDS.keys() | GRPC_CHAT_FIELDS.keys()) - {"echo"} <= ChatCompletionRequest.model_fields.keys()


def test_grpc_tokenizes_with_the_fields_of_the_http_one() -> None:
    request = pb2.TokenizeRequest(model="fake", add_special_tokens=True, **GRPC_CHAT)
    assert _names(request) | {"prompt"} == {field.name for field in pb2.TokenizeRequest.DESCRIPTOR.fields}
    wanted = {"model": "fake", "add_special_tokens": True, **GRPC_CHAT_FIELDS}
    assert tokenize_fields(request) == wanted
    assert wanted.keys() <= TokenizeRequest.model_fields.keys()


@pytest.mark.parametrize(("theirs", "ours"), [("auto", "auto"), ("any", "required"), ("none", "none")])
def test_each_tool_choice_of_messages_has_its_name_here(theirs: str, ours: str) -> None:
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}
    body |= {"tools": [{"name": "f", "input_schema": {"type": "object"}}], "tool_choice": {"type": theirs}}
    assert MessagesRequest.model_validate(body).to_chat().chat_request().tool_choice == ours
