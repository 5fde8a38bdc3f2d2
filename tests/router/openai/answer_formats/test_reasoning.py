"""Thoughts of a model are separated from its answer in every API and in any pieces."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken

from protos.messages import Thought
from router.api_keys import ApiKeys
from router.config import IngressConfig
from router.generation.generation_service import GenerationService
from router.metrics.ingress_metrics import IngressMetrics
from router.openai.api import build_app
from router.requests.reasoning_format import find_reasoning
from router.tokenizer import Tokenizer
from router.tokenizer.tokenizer_files import TokenizerFiles
from tests.router.conftest import byte_tokenizer_core, chat_template
from tests.router.fixtures.fake_backend import FakeBackend, say

TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}[assistant]"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% elif effort is defined %}<think>\n{% endif %}"
)
USER = {"role": "user", "content": "hi <think>"}
THOUGHT, ANSWER = "\n I wonder.\n", "\n\nYes: 42 é"


def thinking_tokenizer() -> Tokenizer:
    core = byte_tokenizer_core()
    core.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=True)])
    return Tokenizer(core)


TOKENIZER = thinking_tokenizer()


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend()


@pytest.fixture
async def http(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    files = TokenizerFiles(TOKENIZER, chat_template(TEMPLATE))
    service = GenerationService(backend, files, IngressConfig(model_id="fake", model_path="nowhere"), IngressMetrics())
    transport = httpx.ASGITransport(build_app(service, ApiKeys()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as client:
        yield client


def model_says(backend: FakeBackend, text: str) -> list[int]:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    backend.next_token = say(*ids, 0)
    return ids


async def chat(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 64, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_thought_is_no_part_of_the_answer(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    model_says(backend, f"<think>{THOUGHT}</think>{ANSWER}")
    answer = await chat(http)
    message = answer["choices"][0]["message"]
    assert message["reasoning"] == "I wonder."
    assert "reasoning_content" not in message
    assert message["content"] == "Yes: 42 é"
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == len(THOUGHT) + 2


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 5, 64])
async def test_a_stream_says_the_same_in_any_pieces(
    http: httpx.AsyncClient, backend: FakeBackend, tokens_per_step: int
) -> None:
    backend.tokens_per_step = tokens_per_step
    model_says(backend, f"\n<think>{THOUGHT}</think>{ANSWER}")
    body = {"messages": [USER], "max_tokens": 64, "stream": True, "stop": ["wonder"]}
    events = (await http.post("/v1/chat/completions", json=body)).text.split("\n\n")
    deltas = [httpx.Response(200, text=event[6:]).json()["choices"][0]["delta"] for event in events[:-2]]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "I wonder."
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes: 42 é"


@pytest.mark.parametrize(
    ("variables", "said", "reasoning", "content"),
    [
        ({"effort": "high"}, f"I wonder.</think>{ANSWER}", "I wonder.", "Yes: 42 é"),
        ({"effort": "high"}, "I never stop", "I never stop", ""),
        ({"enable_thinking": False}, "<think>no</think>", None, "<think>no"),
        ({}, "no <think>thought</think>", None, "no <think>thought"),
    ],
)
async def test_the_prompt_says_whether_a_thought_is_open(
    http: httpx.AsyncClient,
    backend: FakeBackend,
    variables: dict[str, Any],
    said: str,
    reasoning: str | None,
    content: str,
) -> None:
    model_says(backend, said)
    message = (await chat(http, chat_template_kwargs=variables))["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == (reasoning, content)


@pytest.mark.parametrize(
    ("begun", "said", "reasoning", "content"),
    [
        ("It is", " 42 é", None, " 42 é"),
        ("<think>Let me", f" see.\n</think>{ANSWER}", " see.", "Yes: 42 é"),
        ("<think>So.</think>\n\nIt is", " 42 é", None, " 42 é"),
    ],
)
async def test_an_answer_is_continued_in_its_thought_or_behind_it(
    http: httpx.AsyncClient, backend: FakeBackend, begun: str, said: str, reasoning: str | None, content: str
) -> None:
    model_says(backend, said)
    messages = [USER, {"role": "assistant", "content": begun}]
    message = (await chat(http, messages=messages, continue_final_message=True))["choices"][0]["message"]
    assert (message.get("reasoning"), message["content"]) == (reasoning, content)
    answer = (await http.post("/v1/messages", json={"messages": messages, "max_tokens": 64})).json()
    assert "".join(block.get("text", "") for block in answer["content"]) == content


async def test_thoughts_are_left_out_on_request(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    model_says(backend, f"<think>{THOUGHT}</think>{ANSWER}")
    message = (await chat(http, include_reasoning=False))["choices"][0]["message"]
    assert "reasoning" not in message
    assert message["content"] == "Yes: 42 é"


async def test_other_apis_tell_thoughts_apart_too(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    model_says(backend, f"<think>{THOUGHT}</think>{ANSWER}")
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}
    blocks = (await http.post("/v1/messages", json=body)).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    turn = (await http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 64})).json()
    assert [item["type"] for item in turn["output"]] == ["reasoning", "message"]
    assert turn["usage"]["output_tokens_details"]["reasoning_tokens"] == len(THOUGHT) + 2


@pytest.mark.parametrize(("variables", "is_open"), [({}, False), ({"effort": "low"}, True)])
async def test_a_grammar_begins_behind_the_thought(
    http: httpx.AsyncClient, backend: FakeBackend, variables: dict[str, Any], is_open: bool
) -> None:
    model_says(backend, "</think>{}")
    await chat(http, response_format={"type": "json_object"}, chat_template_kwargs=variables)
    begin_id, end_id = (TOKENIZER.token_id(mark) for mark in ("<think>", "</think>"))
    assert backend.requests[0].sampling.grammar.thought == Thought((end_id,), None if is_open else begin_id)


async def test_a_grammar_begins_at_once_where_thinking_is_off(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    model_says(backend, "{}")
    off = {"enable_thinking": False}
    await chat(http, response_format={"type": "json_object"}, chat_template_kwargs=off)
    assert backend.requests[0].sampling.grammar.thought is None


@pytest.mark.parametrize("fields", [{"reasoning_effort": "none"}, {"allowed_token_ids": [1, 2]}])
async def test_no_thought_stands_before_the_grammar(
    http: httpx.AsyncClient, backend: FakeBackend, fields: dict[str, Any]
) -> None:
    """An effort of none closes the thought in the prompt; allowed tokens hold for the whole output."""
    model_says(backend, "{}")
    constraint = {} if "allowed_token_ids" in fields else {"response_format": {"type": "json_object"}}
    await chat(http, **fields, **constraint)
    assert backend.requests[0].sampling.grammar.thought is None


@pytest.mark.parametrize(
    ("template", "wanted", "name"),
    [(TEMPLATE, "auto", "think"), ("", "auto", None), ("", "think", "think"), (TEMPLATE, "none", None)],
)
def test_the_form_is_that_of_the_template_or_the_one_that_is_named(
    template: str, wanted: str, name: str | None
) -> None:
    found = find_reasoning(TOKENIZER, template, wanted)
    assert (found and found.name) == name


def test_marks_that_are_no_tokens_of_the_model_are_no_form(tokenizer: Tokenizer) -> None:
    assert find_reasoning(tokenizer, TEMPLATE) is None
