"""Turns of Codex 0.169.0 and Claude Code 2.1.197 as these programs send them, with their long texts cut short."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic.types import RawMessageStreamEvent
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from router.api_keys import ApiKeys
from router.generation.generation_service import GenerationService
from router.openai.api import build_app
from tests.router.fixtures.fake_backend import FakeBackend, say
from tests.router.openai.test_messages import prompt_of, service, spoken
from tests.router.tokenizer.published import PUBLISHED, template

__all__ = ["service"]  # a fixture

RECORDED = Path(__file__).parent / "recorded"
CALL = '<tool_call>\n{"name": "%s", "arguments": {"%s": "ls"}}\n</tool_call>'
AGENTS = [
    ("codex", "client_metadata, tools.1, tools.2", ResponseStreamEvent, ("exec_command", "cmd")),
    ("claude_code", "context_management", RawMessageStreamEvent, ("Bash", "command")),
]


async def turn(http: httpx.AsyncClient, name: str) -> tuple[httpx.Response, list[dict[str, Any]]]:
    recorded = json.loads((RECORDED / f"{name}.json").read_text())
    answer = await http.post(recorded["path"], headers=recorded["headers"], content=json.dumps(recorded["body"]))
    assert answer.status_code == 200, answer.text
    lines = answer.text.splitlines()
    return answer, [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]


@pytest.mark.parametrize(("name", "ignored", "kind", "call"), AGENTS)
async def test_a_turn_of_an_agent_is_answered_in_its_own_events(
    http: httpx.AsyncClient,
    backend: FakeBackend,
    name: str,
    ignored: str,
    kind: Any,
    call: Any,
) -> None:
    backend.card = replace(backend.card, max_model_len=100_000)
    backend.next_token = say(*spoken("Hello."))
    answer, events = await turn(http, name)
    assert answer.headers["x-ignored-fields"] == ignored
    assert "Say hello." in prompt_of(backend)
    for event in events:
        TypeAdapter(kind).validate_python(event)
    backend.next_token = say(*spoken(CALL % call))
    _, events = await turn(http, name)
    assert any(call[0] in json.dumps(event) for event in events)
    assert not any("<tool_call>" in json.dumps(event) for event in events if "instructions" not in json.dumps(event))


def _texts(node: Any) -> list[str]:
    """The texts of a turn that a prompt must show."""
    if isinstance(node, list):
        return [text for each in node for text in _texts(each)]
    if not isinstance(node, dict):
        return []
    own = [node[key] for key in ("text", "content", "output") if isinstance(node.get(key), str)]
    return [*own, *_texts(node.get("content")), *_texts(node.get("output"))]


# What the programs add once a call of theirs has run, and when the next question comes.
LATER: dict[str, list[list[dict[str, Any]]]] = {
    "codex": [
        [],
        [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I shall look."}]},
            {
                "type": "function_call",
                "call_id": "call_aBcDeFgHiJkLmNoPqRsTuVwX",
                "name": "exec_command",
                "arguments": "{",
            },
            {"type": "function_call", "call_id": "call_b", "name": "exec_command", "arguments": '{"cmd": "ls"}'},
            {"type": "function_call_output", "call_id": "call_aBcDeFgHiJkLmNoPqRsTuVwX", "output": "first output"},
            {"type": "function_call_output", "call_id": "call_b", "output": "second output"},
        ],
        [
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "It is done."}]},
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "The time is noon."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "And now?"}]},
        ],
    ],
    "claude_code": [
        [],
        [
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": ""},
                    {"type": "text", "text": "I shall look."},
                    {"type": "tool_use", "id": "toolu_01AbCdEf", "name": "Bash", "input": {"command": "ls"}},
                    {"type": "tool_use", "id": "toolu_02AbCdEf", "name": "Read", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_01AbCdEf", "content": "first output"},
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_02AbCdEf",
                        "content": [{"type": "text", "text": "second"}],
                    },
                    {"type": "text", "text": "<system-reminder>Keep the list.</system-reminder>"},
                ],
            },
        ],
        [
            {"role": "assistant", "content": [{"type": "text", "text": "It is done."}]},
            {"role": "system", "content": "The time is noon."},
            {"role": "user", "content": "And now?"},
        ],
    ],
}


@pytest.mark.parametrize("agent", LATER)
@pytest.mark.parametrize("name", PUBLISHED)
async def test_every_turn_of_an_agent_is_answered_with_every_template(
    backend: FakeBackend, service: GenerationService, name: str, agent: str
) -> None:
    """With the tools where the template has some that are read, else without: a prompt of theirs needs none."""
    backend.card, backend.next_token = replace(backend.card, max_model_len=200_000), say(0)
    files = replace(service.files, chat_template=template(name))
    own = GenerationService(backend, files, service.config, service.metrics)
    recorded = json.loads((RECORDED / f"{agent}.json").read_text())
    body = {**recorded["body"], "stream": False, "max_tokens": 9} | ({} if own._format else {"tools": []})
    field = "input" if agent == "codex" else "messages"
    transport = httpx.ASGITransport(build_app(own, ApiKeys()))
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as http:
        for more in LATER[agent]:
            body[field] = [*body[field], *more]
            answer = await http.post(recorded["path"], json=body)
            assert answer.status_code == 200, answer.text
            text = own.files.tokenizer.decode(backend.requests[-1].prompt_token_ids, skip_special_tokens=False)
            said = [*_texts(body.get("system", [])), *_texts(body[field])]
            assert [each for each in said if not _stands_in(each, text)] == []
            later = [text.index(each) for each in ("Say hello.", "And now?") if each in said]
            assert later == sorted(later)


def _stands_in(said: str, text: str) -> bool:
    """A template may strip a text, or write it as JSON."""
    said = said.strip()
    return said in text or json.dumps(said, ensure_ascii=False)[1:-1] in text
