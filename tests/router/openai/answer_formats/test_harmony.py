"""Answers of gpt-oss: messages on channels, by its own template, in every API and in any pieces."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken

from engine.sampling.grammar_compiler import GrammarCompiler
from protos.messages import GenerateRequest
from protos.served_model import ModelCard
from router.api_keys import ApiKeys
from router.config import IngressConfig
from router.generation.generation_service import GenerationService
from router.metrics.ingress_metrics import IngressMetrics
from router.openai.api import build_app
from router.tokenizer import Tokenizer
from router.tokenizer.tokenizer_files import TokenizerFiles
from tests.router.conftest import byte_tokenizer_core, chat_template
from tests.router.fixtures.fake_backend import CARD, FakeBackend, say

TEMPLATE = (Path(__file__).parents[2] / "generation" / "templates" / "gpt_oss.jinja").read_text(encoding="utf-8")
MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|return|>")
USER = {"role": "user", "content": "hi"}
SCHEMA = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
ARGUMENTS = '{"x": "é <|call| }\\""}'
THOUGHT = "<|channel|>analysis<|message|>I wonder.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
ANSWER = "<|channel|>final<|message|>Yes: 42 é<|return|>"
CALL = f"<|channel|>commentary to=functions.f <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
CALL_OF_THE_TEMPLATE = f" to=functions.f<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>"


def harmony_tokenizer() -> Tokenizer:
    core = byte_tokenizer_core()
    core.add_tokens([AddedToken(mark, special=True) for mark in MARKS])
    return Tokenizer(core)


TOKENIZER = harmony_tokenizer()
ENDS = tuple(TOKENIZER.token_id(mark) or 0 for mark in ("<|return|>", "<|call|>"))


@pytest.fixture
def backend() -> FakeBackend:
    card: ModelCard = replace(CARD, eos_token_ids=ENDS, max_model_len=8192)
    return FakeBackend(card=card)


@pytest.fixture
async def http(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    async with client(backend, TOKENIZER) as served:
        yield served


def client(backend: FakeBackend, tokenizer: Tokenizer, **settings: Any) -> httpx.AsyncClient:
    files = TokenizerFiles(tokenizer, chat_template(TEMPLATE))
    service = GenerationService(
        backend, files, IngressConfig(model_id="fake", model_path="nowhere", **settings), IngressMetrics()
    )
    transport = httpx.ASGITransport(build_app(service, ApiKeys()), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://outrider")


def model_says(backend: FakeBackend, text: str) -> None:
    backend.next_token = say(*TOKENIZER.encode(text, add_special_tokens=False))


async def chat(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    answer = await http.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 512, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_thought_and_an_answer_are_told_apart(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    model_says(backend, THOUGHT + ANSWER)
    answer = await chat(http)
    [choice] = answer["choices"]
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("I wonder.", "Yes: 42 é")
    assert choice["finish_reason"] == "stop"
    num_tokens = len("analysis") + len("I wonder.") + 3  # the marks before, between and after them
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_tokens


SAID = {
    "the usual head": (THOUGHT + PREAMBLE + CALL, "I wonder.", "Let me see."),
    "the template's own head": (THOUGHT + CALL_OF_THE_TEMPLATE, "I wonder.", ""),
    "at once": (CALL_OF_THE_TEMPLATE, "", ""),
    "two thoughts": (THOUGHT + THOUGHT + CALL, "I wonder.\n\nI wonder.", ""),
}


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 7, 512])
@pytest.mark.parametrize("said", SAID)
async def test_a_call_is_read_in_any_pieces(
    http: httpx.AsyncClient, backend: FakeBackend, said: str, tokens_per_step: int
) -> None:
    text, reasoning, content = SAID[said]
    backend.tokens_per_step = tokens_per_step
    model_says(backend, text)
    body = {"messages": [USER], "max_tokens": 512, "tools": [TOOL], "stream": True}
    events = (await http.post("/v1/chat/completions", json=body)).text.split("\n\n")
    choices = [json.loads(event[6:])["choices"][0] for event in events[:-2]]
    deltas = [choice["delta"] for choice in choices]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == reasoning
    assert "".join(delta.get("content") or "" for delta in deltas) == content
    assert [call["function"]["name"] for call in calls if call.get("id")] == ["f"]
    assert "".join(call["function"]["arguments"] for call in calls) == ARGUMENTS
    assert choices[-1]["finish_reason"] == "tool_calls"


async def test_what_nobody_may_call_is_a_thought(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    """A call without tools, and one of a tool of the model's maker, which does not run here."""
    for text in (CALL, "<|channel|>analysis to=python code<|message|>1 + 1<|call|>"):
        model_says(backend, text)
        [choice] = (await chat(http))["choices"]
        assert choice["message"]["content"] == ""
        assert choice["message"]["reasoning"] in (ARGUMENTS, "1 + 1")


async def test_the_templates_own_turns_are_read(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
    turns = [USER, {"role": "assistant", "content": "So.", "thinking": "Hm.", "tool_calls": [call]}]
    function = {**call["function"], "arguments": json.loads(ARGUMENTS)}
    written = [turns[0], {"role": "assistant", "thinking": "Hm.", "tool_calls": [{"function": function}]}]
    text = chat_template(TEMPLATE).render(written, add_generation_prompt=False, variables={"tools": [TOOL]})
    said = text.rpartition("<|start|>user")[2].partition("<|start|>assistant")[2]
    model_says(backend, said)
    message = (await chat(http, tools=[TOOL]))["choices"][0]["message"]
    assert message["reasoning"] == "Hm."
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == json.loads(ARGUMENTS)
    replayed = [USER, {**message, "content": "So."}, {"role": "tool", "tool_call_id": "c", "content": "1"}]
    await chat(http, messages=replayed, tools=[TOOL])  # the template takes either a text or thoughts with a call
    prompt = TOKENIZER.decode(backend.requests[-1].prompt_token_ids, skip_special_tokens=False)
    assert "analysis<|message|>Hm.\n\nSo.<|end|>" in prompt


async def test_other_apis_have_the_parts_too(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    model_says(backend, THOUGHT + PREAMBLE + ANSWER)
    blocks = (await http.post("/v1/messages", json={"messages": [USER], "max_tokens": 512})).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    assert blocks[1]["text"] == "Let me see.\n\nYes: 42 é"
    turn = (await http.post("/v1/responses", json={"input": "hi", "max_output_tokens": 512})).json()
    assert [item["type"] for item in turn["output"]] == ["reasoning", "message"]


async def test_an_answer_that_is_continued_goes_on_in_its_message(
    http: httpx.AsyncClient, backend: FakeBackend
) -> None:
    model_says(backend, " more.<|return|>")
    messages = [USER, {"role": "assistant", "content": "Once"}]
    [choice] = (await chat(http, messages=messages, continue_final_message=True))["choices"]
    assert choice["message"]["content"] == " more."
    assert "reasoning" not in choice["message"]


async def test_tools_are_refused_where_the_marks_are_no_tokens(backend: FakeBackend) -> None:
    async with client(backend, Tokenizer(byte_tokenizer_core())) as http:
        answer = await http.post("/v1/chat/completions", json={"messages": [USER], "tools": [TOOL], "max_tokens": 9})
    assert answer.status_code == 400
    assert "in a form that is not read" in answer.json()["error"]["message"]


# ---- grammars -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    file = tmp_path_factory.mktemp("harmony") / "tokenizer.json"
    core = byte_tokenizer_core()
    core.add_tokens([AddedToken(mark, special=True) for mark in MARKS])
    core.save(str(file))
    return GrammarCompiler(file, 300, ENDS)


def allows(compiler: GrammarCompiler, request: GenerateRequest, text: str) -> bool:
    """True if the grammar of the request allows all of the text, its end included."""
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    matcher = compiler.matcher(GenerateRequest("x", (1,), replace(request.sampling, stop_token_ids=ENDS)))
    assert matcher is not None
    return matcher.num_allowed(token_ids) == len(token_ids)


FINAL = "<|channel|>final<|message|>{}<|return|>"
GOOD, BAD = (CALL.replace(ARGUMENTS, text) for text in ('{"x": "a"}', '{"x": 1}'))


@pytest.mark.parametrize(
    ("fields", "allowed", "forbidden"),
    [
        ({"tool_choice": "required"}, [GOOD, THOUGHT + GOOD, THOUGHT + PREAMBLE + GOOD], [BAD, ANSWER, THOUGHT + BAD]),
        (
            {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]},
            [GOOD, THOUGHT + GOOD, ANSWER, THOUGHT + PREAMBLE + ANSWER],
            [BAD, THOUGHT + BAD, GOOD.replace("functions.f", "functions.g")],
        ),
        (
            {"response_format": {"type": "json_object"}},
            [THOUGHT + FINAL.format("{}"), GOOD],
            [ANSWER, THOUGHT + ANSWER, GOOD.replace("functions.f", "functions.g")],
        ),
        (
            {"tools": None, "response_format": {"type": "json_object"}},
            [THOUGHT + FINAL.format("{}"), THOUGHT + PREAMBLE + FINAL.format('{"a": 1}')],
            [ANSWER, THOUGHT + ANSWER, GOOD],
        ),
    ],
)
async def test_a_grammar_leaves_the_thoughts_free(
    http: httpx.AsyncClient,
    backend: FakeBackend,
    compiler: GrammarCompiler,
    fields: dict[str, Any],
    allowed: list[str],
    forbidden: list[str],
) -> None:
    model_says(backend, ANSWER)
    await chat(http, **({"tools": [TOOL]} | fields))
    [request] = backend.requests
    assert [text for text in allowed if not allows(compiler, request, text)] == []
    assert [text for text in forbidden if allows(compiler, request, text)] == []
