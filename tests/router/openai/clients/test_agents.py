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

from tests.router.fake_backend import FakeBackend, say
from tests.router.openai.test_messages import prompt_of, service, spoken

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
