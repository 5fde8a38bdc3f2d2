"""The output's limit is bounded by the room in the context; a prompt without any is refused in the API's words."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import pytest

from protos import outrider_pb2 as pb2
from protos import outrider_pb2_grpc
from router.generation.generation_service import GenerationService
from router.openai.api import build_app
from tests.router.fixtures.fake_backend import CARD, FakeBackend
from tests.router.fixtures.grpc_channel import grpc_channel
from tests.router.fixtures.key_files import api_keys

CHAT = [{"role": "user", "content": "abc"}]
LONG = "a" * 140
MAX_LEN = CARD.max_model_len
LIMITS = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_completion_tokens",
    "/v1/responses": "max_output_tokens",
    "/v1/messages": "max_tokens",
}


def body(path: str, text: str, **fields: Any) -> dict[str, Any]:
    name = {"/v1/completions": "prompt", "/v1/responses": "input"}.get(path, "messages")
    return {name: [{"role": "user", "content": text}] if name == "messages" else text, **fields}


def ending(path: str, answer: dict[str, Any]) -> str:
    if path == "/v1/responses":
        assert answer["status"] == "incomplete"
        return str(answer["incomplete_details"]["reason"])
    return str(answer["stop_reason"] if path == "/v1/messages" else answer["choices"][0]["finish_reason"])


ENDINGS = {"/v1/responses": "max_output_tokens", "/v1/messages": "model_context_window_exceeded"}


@pytest.mark.parametrize("path", LIMITS)
@pytest.mark.parametrize("asked", [MAX_LEN, 32_000, 65_535, 2**31, 2**53, -1])
async def test_what_fits_is_generated(http: httpx.AsyncClient, backend: FakeBackend, path: str, asked: int) -> None:
    answer = await http.post(path, json=body(path, "abc", **{LIMITS[path]: asked}))
    assert answer.status_code == 200, answer.text
    assert ending(path, answer.json()) == ENDINGS.get(path, "length")
    [request] = backend.requests
    assert len(request.prompt_token_ids) + request.sampling.max_tokens == MAX_LEN


@pytest.mark.parametrize(("prompt", "chat"), [("abc", ()), (None, (pb2.ChatMessage(role="user", content="abc"),))])
async def test_what_fits_is_generated_over_grpc(
    service: GenerationService, prompt: str | None, chat: tuple[pb2.ChatMessage, ...]
) -> None:
    async with grpc_channel(service) as channel:
        stub = outrider_pb2_grpc.GenerationStub(channel)
        answer = await stub.Generate(pb2.GenerateRequest(prompt=prompt, messages=chat, max_tokens=32_000))
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.total_tokens == MAX_LEN
        with pytest.raises(grpc.aio.AioRpcError, match="reduce the length of the prompt"):
            await stub.Generate(pb2.GenerateRequest(prompt=LONG, max_tokens=1))


async def test_a_tenant_pays_for_what_fits_alone(service: GenerationService) -> None:
    keys = api_keys("secret tokens_per_minute=200")
    transport = httpx.ASGITransport(build_app(service, keys))
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as http:
        for status in (200, 200, 429):
            answer = await http.post(
                "/v1/completions",
                json={"prompt": "abc", "max_tokens": 2**40},
                headers={"authorization": "Bearer secret"},
            )
            assert answer.status_code == status


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 1000, "min_tokens": 1000}, (125, 125)),
        ({"max_tokens": 1000, "min_tokens": 7}, (125, 7)),
        ({"max_tokens": -1, "min_tokens": 1000}, (125, 125)),
        ({"max_tokens": 1000, "truncate_prompt_tokens": -1}, (125, 0)),
    ],
)
async def test_the_least_number_of_tokens_is_bounded_likewise(
    http: httpx.AsyncClient, backend: FakeBackend, fields: dict[str, int], expected: tuple[int, int]
) -> None:
    assert (await http.post("/v1/completions", json={"prompt": "abc", **fields})).status_code == 200
    sampling = backend.requests[0].sampling
    assert (sampling.max_tokens, sampling.min_tokens) == expected


@pytest.mark.parametrize("path", LIMITS)
async def test_a_setting_refuses_what_does_not_fit(service: GenerationService, path: str) -> None:
    service.config = service.config.model_copy(update={"strict_fields": True})
    transport = httpx.ASGITransport(build_app(service, api_keys("secret")))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://outrider", headers={"x-api-key": "secret"}
    ) as http:
        answer = await http.post(path, json=body(path, "abc", **{LIMITS[path]: 500}))
        assert answer.status_code == 400
        error = answer.json()["error"]
        if path == "/v1/messages":
            num_prompt = 128 - int(error["message"].split("limit: ")[1].split(" + 500 > 128")[0])
            assert num_prompt < MAX_LEN
        else:
            assert error["code"] == "context_length_exceeded"
        assert (await http.post(path, json=body(path, "abc", **{LIMITS[path]: -1}))).status_code == 200
        for fields in ({"max_tokens": 500}, {"max_tokens": -1, "min_tokens": 500}):
            answer = await http.post("/v1/completions", json={"prompt": "abc", **fields})
            assert answer.json()["error"]["param"] == list(fields)[-1]


@pytest.mark.parametrize("path", LIMITS)
@pytest.mark.parametrize("text", [LONG, "a" * 15_000])
async def test_a_prompt_that_is_too_long_is_said_in_the_api_s_own_words(
    http: httpx.AsyncClient, path: str, text: str
) -> None:
    """Claude Code shortens a conversation at Anthropic's words; others look for OpenAI's code."""
    answer = await http.post(path, json=body(path, text, **{LIMITS[path]: 5}))
    assert answer.status_code == 400
    error = answer.json()["error"]
    if path == "/v1/messages":
        assert error["type"] == "invalid_request_error"
        words = error["message"].split()
        assert " ".join([*words[:4], "N", *words[5:7], "M", *words[8:]]) == "prompt is too long: N tokens > M maximum"
        assert int(words[4]) > int(words[7]) == MAX_LEN - 1
    else:
        assert error["code"] == "context_length_exceeded"
        assert f"This model's maximum context length is {MAX_LEN} tokens. However, your" in error["message"]
        assert "Please reduce the length of the" in error["message"]


async def test_a_prompt_as_long_as_the_context_is_too_long_by_anthropic_s_numbers(http: httpx.AsyncClient) -> None:
    length = MAX_LEN - len("[user][assistant]")
    error = (await http.post("/v1/messages", json=body("/v1/messages", "a" * length, max_tokens=5))).json()["error"]
    assert error["message"] == f"prompt is too long: {MAX_LEN} tokens > {MAX_LEN - 1} maximum"
