"""Calls whose marks are special tokens, which no text shows otherwise."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

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

TEMPLATE = "{{ tools }}{{ messages[0]['content'] }}[TOOL_CALLS]name[ARGS]"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def mistral_tokenizer() -> Tokenizer:
    core = byte_tokenizer_core()
    core.add_special_tokens(["[TOOL_CALLS]", "[ARGS]", "<s>"])
    return Tokenizer(core)


TOKENIZER = mistral_tokenizer()


@pytest.fixture
def backend() -> FakeBackend:
    ids = TOKENIZER.encode('<s>so[TOOL_CALLS]f[ARGS]{"a": 1}', add_special_tokens=False)
    return FakeBackend(say(*ids, 0))


@pytest.fixture
async def http(backend: FakeBackend) -> AsyncIterator[httpx.AsyncClient]:
    files = TokenizerFiles(TOKENIZER, chat_template(TEMPLATE))
    service = GenerationService(backend, files, IngressConfig(model_id="fake", model_path="nowhere"), IngressMetrics())
    transport = httpx.ASGITransport(build_app(service, ApiKeys()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as client:
        yield client


async def test_a_call_is_read_and_other_special_tokens_are_not_shown(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 32, "tools": [TOOL]}
    [choice] = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
    [call] = choice["message"]["tool_calls"]
    assert choice["message"]["content"] == "so"
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"a": 1})
    assert choice["finish_reason"] == "tool_calls"


async def test_without_tools_no_mark_is_shown(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 32}
    [choice] = (await http.post("/v1/chat/completions", json=body)).json()["choices"]
    assert choice["message"]["content"] == 'sof{"a": 1}'


async def test_a_required_call_names_the_tokens_themselves(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 32, "tools": [TOOL]}
    await http.post("/v1/chat/completions", json={**body, "tool_choice": "required"})
    grammar = backend.requests[0].sampling.grammar
    assert f"start: <[{TOKENIZER.token_id('[TOOL_CALLS]')}]>" in grammar.source
    assert f"<[{TOKENIZER.token_id('[ARGS]')}]>" in grammar.source
