"""Answers of a model whose tokenizer describes them, in a form that is not read here."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from protos.errors import ConfigError
from router.api_keys import ApiKeys
from router.config import IngressConfig
from router.generation.generation_service import GenerationService
from router.metrics.ingress_metrics import IngressMetrics
from router.openai.api import build_app
from router.tokenizer.tokenizer_files import load_tokenizer_files
from tests.router.conftest import byte_tokenizer_core
from tests.router.fixtures.fake_backend import FakeBackend, say

CHAT_TEMPLATE = "{% if tools %}tools{% endif %}{{ messages[-1].content }}[assistant]"
RESPONSE_TEMPLATE = {
    "start_anchor": "[assistant]",
    "fields": {
        "thinking": {"open": "(thinks:", "close": ")"},
        "tool_calls": {
            "open_pattern": r"@(?P<name>\w+)",
            "close": ";",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {},
    },
}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}


def write(folder: Path, response_template: object) -> str:
    byte_tokenizer_core().save(str(folder / "tokenizer.json"))
    config = {"chat_template": CHAT_TEMPLATE, "response_template": response_template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def service(backend: FakeBackend, folder: str) -> GenerationService:
    return GenerationService(
        backend, load_tokenizer_files(folder), IngressConfig(model_id="fake", model_path=folder), IngressMetrics()
    )


@pytest.fixture
async def http(backend: FakeBackend, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(service(backend, write(tmp_path, RESPONSE_TEMPLATE)), ApiKeys())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as client:
        yield client


def model_says(backend: FakeBackend, text: str) -> None:
    backend.next_token = say(*(byte + 1 for byte in text.encode()), 0)


ANSWERS = [
    ('(thinks: Hm.) So. @f{"x": 1}; @f{"x": 2};', "Hm.", "So.", ['{"x": 1}', '{"x": 2}'], "tool_calls"),
    ("Only é text.", "", "Only é text.", [], "stop"),
    ("So @f{broken}; and on", "", "So @f{broken}; and on", [], "stop"),
    ('So @f{"x": 1', "", 'So @f{"x": 1', [], "stop"),
]


@pytest.mark.parametrize("tokens_per_step", [1, 3, 64])
@pytest.mark.parametrize(("said", "reasoning", "content", "calls", "reason"), ANSWERS)
async def test_an_answer_is_read_by_the_tokenizers_description_in_any_pieces(
    http: httpx.AsyncClient,
    backend: FakeBackend,
    said: str,
    reasoning: str,
    content: str,
    calls: list[str],
    reason: str,
    tokens_per_step: int,
) -> None:
    backend.tokens_per_step = tokens_per_step
    model_says(backend, said)
    [choice] = (await http.post("/v1/chat/completions", json={**BODY, "tools": [TOOL]})).json()["choices"]
    message = choice["message"]
    assert (message.get("reasoning") or "", message["content"] or "") == (reasoning, content)
    assert [call["function"]["arguments"] for call in message.get("tool_calls") or ()] == calls
    assert choice["finish_reason"] == reason


@pytest.mark.parametrize(
    "fields",
    [{"tool_choice": "required"}, {"response_format": {"type": "json_object"}}, {"parallel_tool_calls": False}],
)
async def test_what_needs_a_grammar_of_calls_is_refused(http: httpx.AsyncClient, fields: dict[str, Any]) -> None:
    answer = await http.post("/v1/chat/completions", json={**BODY, "tools": [TOOL], **fields})
    assert answer.status_code == 400
    assert "no grammar" in answer.json()["error"]["message"]


def test_a_description_that_cannot_be_read_is_refused_at_start(backend: FakeBackend, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="start_anchor"):
        service(backend, write(tmp_path, {"fields": {"content": {}}}))
