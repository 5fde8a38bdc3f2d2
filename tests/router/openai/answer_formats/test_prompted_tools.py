"""Tools for a model whose template has none, by an operator's wish."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from router.api_keys import ApiKeys
from router.config import IngressConfig
from router.generation.generation_service import GenerationService
from router.metrics.ingress_metrics import IngressMetrics
from router.openai.api import build_app
from router.tokenizer import Tokenizer
from router.tokenizer.tokenizer_files import TokenizerFiles
from tests.router.conftest import byte_tokenizer_core, chat_template
from tests.router.fixtures.fake_backend import FakeBackend, say

TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TOKENIZER = Tokenizer(byte_tokenizer_core())
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
USER = {"role": "user", "content": "hi"}


@pytest.fixture
def backend() -> FakeBackend:
    backend = FakeBackend(say(*TOKENIZER.encode(CALL, add_special_tokens=False), 0))
    backend.card = replace(backend.card, max_model_len=2000)
    return backend


@pytest.fixture
async def http(backend: FakeBackend, request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    files = TokenizerFiles(TOKENIZER, chat_template(TEMPLATE))
    config = IngressConfig(model_id="fake", model_path="nowhere", tool_format=getattr(request, "param", "prompted"))
    service = GenerationService(backend, files, config, IngressMetrics())
    transport = httpx.ASGITransport(build_app(service, ApiKeys()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as client:
        yield client


async def ask(http: httpx.AsyncClient, messages: list[dict[str, object]], **fields: object) -> httpx.Response:
    body = {"messages": messages, "max_tokens": 80, "tools": [TOOL], **fields}
    return await http.post("/v1/chat/completions", json=body)


def prompt_of(backend: FakeBackend) -> str:
    return TOKENIZER.decode(backend.requests[-1].prompt_token_ids)


async def test_tools_and_their_form_stand_in_the_system_message(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    answer = await ask(http, [{"role": "system", "content": "Be kind."}, USER])
    [choice] = answer.json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"a": 1})
    assert choice["finish_reason"] == "tool_calls"
    prompt = prompt_of(backend)
    assert prompt.startswith("[system]Be kind.\n\n# Tools")
    assert '{"name": "f", "parameters": {"type": "object"}}' in prompt
    assert prompt.endswith("[user]hi[assistant]")


async def test_earlier_calls_and_results_are_text(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    turn = {
        "role": "assistant",
        "tool_calls": [
            {"id": name, "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}} for name in "xy"
        ],
    }
    results = [{"role": "tool", "tool_call_id": name, "content": f"result {name}"} for name in "xy"]
    await ask(http, [USER, turn, *results])
    told = "".join(f"<tool_response>\nresult {name}\n</tool_response>" + "\n" * (name == "x") for name in "xy")
    assert prompt_of(backend).endswith(f"[user]hi[assistant]{CALL}\n{CALL}[user]{told}[assistant]")


async def test_a_required_call_is_a_grammar(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    await ask(http, [USER], tool_choice="required")
    assert "<tool_call>" in backend.requests[-1].sampling.grammar.source


@pytest.mark.parametrize("http", ["auto"], indirect=True)
async def test_without_the_setting_tools_are_refused(http: httpx.AsyncClient) -> None:
    answer = await ask(http, [USER])
    assert answer.status_code == 400
    assert "ingress.tool_format: to 'prompted'" in answer.json()["error"]["message"]
