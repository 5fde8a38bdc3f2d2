"""Requests as other servers' clients send them: fields of theirs, compressed bodies, other headers."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import replace

import httpx
import pytest

from router.api_keys import ApiKeys
from router.generation.generation_service import GenerationService
from router.openai.api import build_app
from tests.router.fixtures.fake_backend import FakeBackend, say
from tests.router.fixtures.key_files import api_keys

COMPLETION = {"prompt": "abc", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}


def prompt_of(backend: FakeBackend) -> str:
    return bytes(token_id - 1 for token_id in backend.requests[-1].prompt_token_ids).decode()


async def post(http: httpx.AsyncClient, body: dict, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    answer = await http.post(path, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


async def test_a_request_without_a_model_gets_the_one_that_is_served(http: httpx.AsyncClient) -> None:
    assert (await post(http, COMPLETION)).json()["model"] == "fake"
    assert (await post(http, CHAT, "/v1/chat/completions")).json()["model"] == "fake"


async def test_fields_that_mean_nothing_are_named(http: httpx.AsyncClient) -> None:
    answer = await post(http, {**COMPLETION, "mood": 1, "stream_options": None, "spaces_between_special_tokens": True})
    assert answer.headers["x-ignored-fields"] == "mood, spaces_between_special_tokens"
    assert answer.json()["choices"][0]["text"] == "defg"
    assert "x-ignored-fields" not in (await post(http, COMPLETION)).headers


async def test_fields_inside_of_others_are_named_by_their_path(http: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "hi", "mood\n": "é"}, {"role": "user", "content": "you", "id": 7, "at": 8}]
    answer = await post(http, {**CHAT, "messages": messages, "tool_choice": None}, "/v1/chat/completions")
    assert answer.headers["x-ignored-fields"] == "messages.0.mood%0A, messages.1.id, messages.1.at"


async def test_an_error_behind_an_ignored_field_is_still_one(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={**COMPLETION, "mood": 1, "temperature": 3})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "temperature"


@pytest.mark.parametrize("field", ["use_beam_search", "logits_processors", "chat_template"])
async def test_fields_that_would_change_the_answer_are_refused(http: httpx.AsyncClient, field: str) -> None:
    answer = await http.post("/v1/chat/completions", json={**CHAT, field: "x"})
    assert answer.json()["error"]["param"] == field


async def test_the_stop_string_is_shown_on_demand(http: httpx.AsyncClient) -> None:
    body = {"prompt": "abc", "max_tokens": 20, "stop": ["fg"]}
    assert (await post(http, body)).json()["choices"][0]["text"] == "de"
    shown = await post(http, {**body, "include_stop_str_in_output": True})
    assert shown.json()["choices"][0]["text"] == "defg"


async def test_the_last_message_is_continued(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes, "}]
    await post(http, {**CHAT, "messages": messages, "continue_final_message": True}, "/v1/chat/completions")
    assert prompt_of(backend) == "[user]hi[assistant]yes, "
    both = {**CHAT, "messages": messages, "continue_final_message": True, "add_generation_prompt": True}
    assert (await http.post("/v1/chat/completions", json=both)).status_code == 400


async def test_a_prompt_is_cut_to_its_end(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    await post(http, {**COMPLETION, "truncate_prompt_tokens": 2})
    assert prompt_of(backend) == "bc"
    await post(http, {"prompt": "a" * 500, "max_tokens": 28, "truncate_prompt_tokens": -1})
    assert len(prompt_of(backend)) == 100


async def test_the_prompt_s_logprobs_are_by_token_id(http: httpx.AsyncClient) -> None:
    first, second, third = (await post(http, {**COMPLETION, "prompt_logprobs": 1})).json()["choices"][0][
        "prompt_logprobs"
    ]
    assert first is None
    assert second == {"99": {"logprob": -0.25, "rank": 1, "decoded_token": "b"}}
    assert list(third) == ["100"]
    chat = (await post(http, {**CHAT, "prompt_logprobs": 0}, "/v1/chat/completions")).json()
    assert len(chat["prompt_logprobs"]) == len("[user]hi[assistant]")


async def test_allowed_tokens_are_a_grammar(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    await post(http, {**COMPLETION, "allowed_token_ids": [99, 98]})
    assert "(<[98,99]>)*" in backend.requests[-1].sampling.grammar.source
    answer = await http.post("/v1/completions", json={**COMPLETION, "allowed_token_ids": [1], "guided_regex": "a"})
    assert answer.json()["error"]["param"] == "allowed_token_ids"


@pytest.mark.parametrize(
    "replayed",
    [
        {"reasoning": "hm"},
        {"reasoning_content": "hm"},
        {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "s"}], "provider_specific_fields": {}},
        {"cache_control": {"type": "ephemeral"}, "reasoning": "hm", "annotations": []},
    ],
)
async def test_replayed_thoughts_reach_the_template_under_every_name(
    http: httpx.AsyncClient, backend: FakeBackend, service: GenerationService, replayed: dict
) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.content }}{% endfor %}"
    service.files = replace(service.files, chat_template=type(service.files.chat_template)(template, {}))
    content = [{"type": "thinking", "thinking": "no"}, {"type": "text", "text": "yes", "cache_control": {}}]
    messages = [{"role": "assistant", "content": content, **replayed}]
    answer = await post(http, {**CHAT, "messages": messages}, "/v1/chat/completions")
    assert prompt_of(backend) == "hm|hm|yes"
    assert "x-ignored-fields" not in answer.headers


async def test_compressed_bodies_are_read_and_bounded(http: httpx.AsyncClient) -> None:
    raw = json.dumps(COMPLETION).encode()
    kind = {"content-type": "application/json"}
    for encoding, content in (("gzip", gzip.compress(raw)), ("deflate", zlib.compress(raw))):
        answer = await http.post("/v1/completions", content=content, headers={**kind, "content-encoding": encoding})
        assert answer.json()["choices"][0]["text"] == "defg"
    bomb = gzip.compress(json.dumps({"prompt": "a" * 10_000_000}).encode())
    assert len(bomb) < 20_000
    for encoding, content, status in (
        ("gzip", bomb, 413),
        ("gzip", raw, 400),
        ("gzip", gzip.compress(raw)[:-12], 400),
        ("br", raw, 400),
    ):
        answer = await http.post("/v1/completions", content=content, headers={**kind, "content-encoding": encoding})
        assert answer.status_code == status, answer.text


async def test_a_key_may_come_as_anthropic_s_clients_send_it(service: GenerationService) -> None:
    transport = httpx.ASGITransport(build_app(service, api_keys("sesame")))
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as http:
        assert (await http.get("/v1/models", headers={"x-api-key": "sesame"})).status_code == 200
        assert (await http.get("/v1/models", headers={"x-api-key": "wrong"})).status_code == 401
        assert (await http.get("/live")).status_code == 200


async def test_pages_of_known_origins_may_call(service: GenerationService) -> None:
    service.config = service.config.model_copy(update={"cors_origins": ("http://localhost:*", "https://chat.example")})
    transport = httpx.ASGITransport(build_app(service, api_keys("sesame")))
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as http:
        for origin, status in (
            ("http://localhost:3000", 200),
            ("https://chat.example", 200),
            ("https://chat.example.evil", 400),
            ("http://localhost:1@evil", 400),
        ):
            answer = await http.options("/v1/chat/completions", headers={"origin": origin, **asked})
            assert answer.status_code == status, origin


async def test_liveness_asks_no_pair_and_readiness_does(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    async def describe() -> None:
        raise TimeoutError

    assert (await http.get("/ready")).status_code == 200
    backend.describe = describe
    assert (await http.get("/ready")).status_code == 503
    assert (await http.get("/live")).json() == {"status": "ok"}


async def test_the_model_list_has_what_vllm_s_tools_read(http: httpx.AsyncClient) -> None:
    [model] = (await http.get("/v1/models")).json()["data"]
    assert (model["root"], model["parent"], len(model["permission"])) == ("fake", None, 1)


def tool(name: str) -> dict:
    return {"type": "function", "function": {"name": name}, "cache_control": {"type": "ephemeral"}}


@pytest.mark.parametrize(("mode", "start"), [("auto", "start: TEXT"), ("required", "start: ")])
async def test_allowed_tools_are_the_only_ones_that_may_be_called(
    http: httpx.AsyncClient, backend: FakeBackend, service: GenerationService, mode: str, start: str
) -> None:
    template = type(service.files.chat_template)("{{ tools | tojson }}<tool_call>{{ messages[0].content }}", {})
    files = replace(service.files, chat_template=template)
    service = GenerationService(backend, files, service.config, service.metrics)
    backend.next_token = say(0)
    backend.card = replace(backend.card, max_model_len=1000)
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [tool("b")]}}
    body = {**CHAT, "tools": [tool("a"), tool("b")], "tool_choice": choice}
    transport = httpx.ASGITransport(build_app(service, ApiKeys()))
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as app:
        answer = await post(app, body, "/v1/chat/completions")
        assert '"name": "a"' in prompt_of(backend)
        assert "cache_control" not in prompt_of(backend)
        source = backend.requests[-1].sampling.grammar.source
        assert start in source
        assert '\\"b\\"' in source
        assert '\\"a\\"' not in source
        assert "x-ignored-fields" not in answer.headers
        choice["allowed_tools"]["tools"] = [tool("c")]
        assert "'c'" in (await app.post("/v1/chat/completions", json=body)).json()["error"]["message"]


async def test_a_body_of_unknown_names_alone_is_refused_without_listing_them(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={**COMPLETION, **{f"x{rank}": 0 for rank in range(1001)}})
    assert answer.status_code == 400
    assert "1001 unknown fields" in answer.json()["error"]["message"]
