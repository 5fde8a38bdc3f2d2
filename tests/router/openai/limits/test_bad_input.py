"""Whatever a client sends, it gets OpenAI's error object, naming the value and the limit."""

from __future__ import annotations

import json
from dataclasses import replace

import httpx
import pytest

from protos.errors import UnavailableError
from router.api_keys import ApiKeys
from router.config import IngressLimits
from router.generation.generation_service import GenerationService
from router.openai.api import build_app
from router.tokenizer import Tokenizer
from tests.router.fixtures.fake_backend import FakeBackend
from tests.router.fixtures.key_files import api_keys

GOOD = {"model": "fake", "prompt": "abc"}


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"prompt": ""}, "prompt", ["empty"]),
        ({"prompt": []}, "prompt", ["empty"]),
        ({"prompt": ["a", ""]}, "prompt", ["prompt[1]", "empty"]),
        ({"prompt": [[1], []]}, "prompt", ["prompt[1]", "empty"]),
        ({"prompt": {"a": 1}}, "prompt", ["string"]),
        ({"prompt": ["a", 1]}, "prompt", ["prompt[1]"]),
        ({"prompt": [1, True]}, "prompt", ["prompt[0]"]),
        ({"prompt": [1, 300]}, "prompt", ["300", "[0, 300)"]),
        ({"prompt": [-1]}, "prompt", ["-1"]),
        ({"prompt": [10**30]}, "prompt", ["10000000000"]),
        ({"prompt": None}, "prompt", []),
        ({"prompt": "a" * 128}, "prompt", ["128", "127"]),
        ({"max_tokens": -2}, "max_tokens", ["at least -1"]),
        ({"max_tokens": 10**30}, "max_tokens", ["at most"]),
        ({"max_tokens": 0}, "max_tokens", ["0", "at least 1"]),
        ({"max_tokens": "5"}, "max_tokens", ["'5'", "an integer"]),
        ({"max_tokens": 1.5}, "max_tokens", ["1.5", "an integer"]),
        ({"max_tokens": True}, "max_tokens", ["True", "an integer"]),
        ({"temperature": -0.1}, "temperature", ["-0.1", "at least 0"]),
        ({"temperature": 2.5}, "temperature", ["2.5", "at most 2"]),
        ({"temperature": "hot"}, "temperature", ["'hot'", "a number"]),
        ({"temperature": float("nan")}, "temperature", ["nan", "finite"]),
        ({"temperature": float("inf")}, "temperature", ["inf", "finite"]),
        ({"top_p": -0.1}, "top_p", ["at least 0"]),
        ({"top_p": 1.1}, "top_p", ["at most 1"]),
        ({"top_k": -2}, "top_k", ["-2", "at least -1"]),
        ({"min_p": 2}, "min_p", ["at most 1"]),
        ({"repetition_penalty": 0}, "repetition_penalty", ["at least 1e-06"]),
        ({"repetition_penalty": 1e-300}, "repetition_penalty", ["1e-300", "at least 1e-06"]),
        ({"presence_penalty": 3}, "presence_penalty", ["at most 2"]),
        ({"n": 0}, "n", ["at least 1"]),
        ({"n": 129}, "n", ["129", "128"]),
        ({"n": 43, "prompt": ["a", "b", "c"]}, "n", ["129 choices", "128"]),
        ({"best_of": 3}, "best_of", ["3"]),
        ({"suffix": "x"}, "suffix", ["not supported"]),
        ({"response_format": {"type": "json"}}, "response_format.type", ["json_object"]),
        ({"response_format": {"type": "json_schema"}}, "response_format", ["json_schema"]),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex", ["both"]),
        ({"guided_json": "{"}, "guided_json", ["not valid JSON"]),
        ({"guided_json": "[" * 5000}, "guided_json", ["nested too deeply"]),
        ({"guided_json": 3}, "guided_json", ["not a JSON schema"]),
        ({"guided_choice": []}, "guided_choice", ["at least 1"]),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp", ["Did you mean regex?"]),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", ["both"]),
        ({"logprobs": 21}, "logprobs", ["at most 20"]),
        ({"logprobs": True}, "logprobs", ["an integer"]),
        ({"stop": ["a"] * 17}, "stop", ["at most 16"]),
        ({"stop": 5}, "stop", ["5", "a list"]),
        ({"logit_bias": {"x": 1}}, "logit_bias", ["'x'"]),
        ({"logit_bias": {str(token_id): 1 for token_id in range(1025)}}, "logit_bias", ["at most 1024"]),
        ({"prompt": ["a"] * 2000}, "n", ["2000 prompts", "one request may have"]),
        ({"prompt": [[]] * 4097}, "prompt", ["4097 prompts; send at most 4096"]),
        ({"logit_bias": {"05": 1}}, "logit_bias", ["'05'"]),
        ({"logit_bias": {"-1": 1}}, "logit_bias", ["-1"]),
        ({"logit_bias": {"999": 1}}, "logit_bias", ["999"]),
        ({"logit_bias": {"1": 101}}, "logit_bias.1", ["at most 100"]),
        ({"stop_token_ids": [300]}, "stop_token_ids", ["300"]),
        ({"min_tokens": 17}, "min_tokens", ["17", "16"]),
        ({"seed": 2**64}, "seed", ["at most"]),
        ({"speculation": {"num_tokens": 5}}, "speculation.num_tokens", ["5", "4"]),
        ({"speculation": {"verify": "magic"}}, "speculation.verify", ["coupled"]),
        ({"speculation": {"method": "magic"}}, "speculation.method", ["'magic'", "model, ngram, none"]),
        ({"speculation": {"method": "suffix"}}, "speculation.method", ["'suffix'", "model, ngram, none"]),
        ({"speculation": {"enable": True}}, "speculation.enable", ["enabled"]),
        ({"model": 5}, "model", ["a string"]),
        ({"stream_options": {"include_usage": True}}, "stream_options", ["stream"]),
        ({"timeout_s": -1}, "timeout_s", ["greater than 0"]),
    ],
)
async def test_a_bad_parameter_is_named_with_its_limit(
    http: httpx.AsyncClient, change: dict, param: str, words: list[str]
) -> None:
    body = json.dumps({**GOOD, **change})  # Python writes NaN and Infinity, as careless clients do
    response = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    error = error_of(response, 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert all(word in error["message"] for word in words), error["message"]


@pytest.mark.parametrize(
    ("change", "param", "words"),
    [
        ({"tools": [{}]}, "tools", ["Unknown parameter"]),
        ({"temprature": 1}, "temprature", ["temperature"]),
        (
            {"stream": True, "stream_options": {"continuous_usage": True}},
            "stream_options.continuous_usage",
            ["Did you mean"],
        ),
    ],
)
async def test_an_unknown_field_is_refused_where_fields_are_strict(
    service: GenerationService, change: dict, param: str, words: list[str]
) -> None:
    service.config = service.config.model_copy(update={"strict_fields": True})
    transport = httpx.ASGITransport(build_app(service, ApiKeys()))
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as http:
        error = error_of(await http.post("/v1/completions", json={**GOOD, **change}), 400)
    assert error["param"] == param
    assert all(word in error["message"] for word in words), error["message"]


async def test_a_missing_parameter_is_named(http: httpx.AsyncClient) -> None:
    error = error_of(await http.post("/v1/completions", json={"model": "fake"}), 400)
    assert (error["param"], error["message"]) == ("prompt", "Missing required parameter: prompt.")


@pytest.mark.parametrize("body", [b"{", b"", b"\xff\xfe", b'{"model": "fake", "prompt": "\\ud800"}', b"[" * 5000])
async def test_a_body_that_is_not_json_is_refused(http: httpx.AsyncClient, body: bytes) -> None:
    response = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert "not valid JSON" in error_of(response, 400)["message"]


@pytest.mark.parametrize("body", [b"[]", b"5", b"null", b'"a"'])
async def test_a_body_that_is_no_object_is_refused(http: httpx.AsyncClient, body: bytes) -> None:
    response = await http.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert "JSON object" in error_of(response, 400)["message"]


async def test_another_content_type_is_refused(http: httpx.AsyncClient) -> None:
    response = await http.post("/v1/completions", content=json.dumps(GOOD), headers={"content-type": "text/plain"})
    assert "text/plain" in error_of(response, 400)["message"]
    assert "application/json" in error_of(await http.post("/v1/completions", content="{}"), 400)["message"]


async def test_a_body_that_is_too_long_is_not_read(http: httpx.AsyncClient) -> None:
    error = error_of(await http.post("/v1/completions", json={**GOOD, "prompt": "a" * 30_000}), 413)
    assert "20000" in error["message"]


async def test_an_unknown_model_is_not_found(http: httpx.AsyncClient) -> None:
    for response in (
        await http.post("/v1/completions", json={**GOOD, "model": "other"}),
        await http.get("/v1/models/other"),
        await http.post("/tokenize", json={"model": "other", "prompt": "a"}),
    ):
        error = error_of(response, 404)
        assert error["code"] == "model_not_found"
        assert "'other'" in error["message"]
        assert "'fake'" in error["message"]


async def test_a_context_overflow_has_its_own_code(http: httpx.AsyncClient) -> None:
    error = error_of(await http.post("/v1/completions", json={**GOOD, "prompt": "a" * 128}), 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a" * 15_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 15_000}]}),
        ("/tokenize", {"prompt": "a" * 15_000}),
    ],
)
async def test_a_text_that_cannot_fit_is_refused_unread(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, object]
) -> None:
    monkeypatch.setattr(Tokenizer, "encode", lambda *args, **options: pytest.fail("it was read"))
    error = error_of(await http.post(path, json=body), 400)
    assert error["code"] == "context_length_exceeded"
    assert "15" in error["message"]


async def test_unknown_paths_and_methods_are_errors_of_the_same_form(http: httpx.AsyncClient) -> None:
    assert "/v1/nothing" in error_of(await http.get("/v1/nothing"), 404)["message"]
    assert "GET" in error_of(await http.get("/v1/completions"), 405)["message"]


@pytest.mark.parametrize(("given_s", "told"), [(2, "2"), (None, "1")])
async def test_no_pair_is_unavailable(
    http: httpx.AsyncClient, backend: FakeBackend, given_s: float | None, told: str
) -> None:
    async def describe() -> None:
        raise UnavailableError("no pair is ready", retry_after_s=given_s)

    backend.describe = describe
    response = await http.post("/v1/completions", json=GOOD)
    assert error_of(response, 503)["type"] == "service_unavailable_error"
    assert response.headers["retry-after"] == told
    assert (await http.get("/health")).status_code == 503


async def test_a_fault_of_ours_says_nothing_of_its_inside(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.failures = [RuntimeError("secret path")]
    response = await http.post("/v1/completions", json=GOOD)
    assert "secret" not in error_of(response, 500)["message"]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hello",
        [{"role": "nobody", "content": "x"}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 5000}}]}],
        [{"content": "x"}],
        ["x"],
    ],
)
async def test_bad_messages_are_refused(http: httpx.AsyncClient, messages: object) -> None:
    response = await http.post("/v1/chat/completions", json={"model": "fake", "messages": messages})
    assert error_of(response, 400)["param"].startswith("messages")


async def test_calls_need_a_known_key_where_keys_are_set(service: GenerationService) -> None:
    transport = httpx.ASGITransport(build_app(service, api_keys("sesame")))
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as http:
        assert error_of(await http.get("/v1/models"), 401)["code"] == "invalid_api_key"
        assert (await http.get("/v1/models", headers={"authorization": "Bearer sesame"})).status_code == 200
        error_of(await http.post("/v1/completions", json=GOOD, headers={"authorization": "Bearer wrong"}), 401)
        error_of(
            await http.post("/v1/completions", json=GOOD, headers={"authorization": "Bearer sésame".encode()}), 401
        )
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/metrics")).status_code == 200


async def test_a_priority_must_be_granted_where_keys_are_set(service: GenerationService, backend: FakeBackend) -> None:
    keys = api_keys("plain", "urgent max_priority=-2", "late max_priority=5")
    transport = httpx.ASGITransport(build_app(service, keys))
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as http:
        for key, priority, status in (("plain", 0, 200), ("plain", -1, 400), ("urgent", -2, 200), ("urgent", -3, 400)):
            headers = {"authorization": f"Bearer {key}"}
            response = await http.post("/v1/completions", json={**GOOD, "priority": priority}, headers=headers)
            assert response.status_code == status, response.text
            assert status == 200 or response.json()["error"]["param"] == "priority"
        for key, priority in (("plain", 0), ("urgent", 0), ("late", 5)):
            await http.post("/v1/completions", json=GOOD, headers={"authorization": f"Bearer {key}"})
            assert backend.requests[-1].priority == priority, "who may be urgent has to ask for it"


@pytest.mark.parametrize("limits", [IngressLimits()])
async def test_logprobs_of_a_prompt_fit_into_a_message(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    """A longer one would end the line between target and shell, and every stream on it, three times over."""
    backend.card = replace(backend.card, max_model_len=200_000)
    body = {"model": "fake", "max_tokens": 1, "temperature": 0}
    for more in ({"prompt_logprobs": 19}, {"echo": True, "logprobs": 19}):
        answer = await http.post("/v1/completions", json={**body, "prompt": [1] * 100_001, **more})
        assert "2000020; at most 2000000" in error_of(answer, 400)["message"]
    assert not backend.requests
    most = {**body, "prompt": [1] * 100_000, "prompt_logprobs": 19}
    assert (await http.post("/v1/completions", json=most)).status_code == 200


@pytest.mark.parametrize("limits", [IngressLimits()])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    ],
)
async def test_one_tool_too_many_is_refused_with_the_limit(http: httpx.AsyncClient, path: str, body: dict) -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    tools = {
        "/v1/chat/completions": {"type": "function", "function": function},
        "/v1/responses": {"type": "function", **function},
        "/v1/messages": {"name": "f", "input_schema": {"type": "object"}},
    }
    answer = await http.post(path, json={**body, "tools": [tools[path]] * 1025})
    assert answer.status_code == 400
    assert "1024" in answer.json()["error"]["message"]
