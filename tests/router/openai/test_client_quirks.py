"""Published clients' deviations from the APIs are accepted as in vLLM or llama.cpp."""

from __future__ import annotations

import codecs
import json
from typing import Any

import httpx
import pytest

from router.api_keys import ApiKeys
from router.generation.generation_service import GenerationService
from router.openai.api import build_app
from tests.router.fixtures.fake_backend import FakeBackend
from tests.router.fixtures.key_files import api_keys

JSON = {"content-type": "application/json"}
CHAT = [{"role": "user", "content": "abc"}]
POSTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 2},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 2},
    "/v1/responses": {"input": "abc", "max_output_tokens": 2},
    "/v1/messages": {"messages": CHAT, "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": CHAT},
    "/tokenize": {"prompt": "abc"},
    "/detokenize": {"tokens": [98]},
}
GETS = ["/", "/docs", "/openapi.json", "/health", "/live", "/ready", "/metrics", "/v1/models", "/v1/models/fake"]


@pytest.mark.parametrize("path", [*GETS, "/page/page.js"])
async def test_head_is_answered_wherever_get_is(http: httpx.AsyncClient, path: str) -> None:
    get, head = await http.get(path), await http.head(path)
    assert head.status_code == get.status_code
    assert head.headers["content-type"] == get.headers["content-type"]


@pytest.mark.parametrize("path", [*POSTS, *(path for path in GETS if path not in ("/", "/metrics"))])
@pytest.mark.parametrize("form", ["{}/", "/{}", "{}//"])
async def test_slashes_too_many_are_read_past_without_a_redirect(http: httpx.AsyncClient, path: str, form: str) -> None:
    method = "POST" if path in POSTS else "GET"
    url = httpx.URL("http://outrider", raw_path=form.format(path).encode())
    request = http.build_request(method, url, json=POSTS.get(path))
    assert request.url.raw_path.decode() == form.format(path)
    assert (await http.send(request)).status_code == 200


async def test_the_metrics_have_one_path_by_which_a_proxy_keeps_them(http: httpx.AsyncClient) -> None:
    for path in (b"/metrics/", b"//metrics", b"/metrics//"):
        answer = await http.get(httpx.URL("http://outrider", raw_path=path))
        assert answer.status_code == 404


@pytest.mark.parametrize(
    ("path", "change"),
    [
        *[(path, {"metadata": {"n": 1, "is": True, "s": "text"}}) for path in list(POSTS)[:3]],
        *[(path, {"model": ""}) for path in list(POSTS)[:4]],
        *[(path, {"model": None}) for path in list(POSTS)[:4]],
        *[(path, {"temperature": None, "top_p": None}) for path in list(POSTS)[:4]],
        *[(path, {"top_p": 0}) for path in list(POSTS)[:4]],
        *[(path, {"seed": seed}) for path in list(POSTS)[:4] for seed in (-1, 3.0, 2**64 - 1, None)],
        *[(path, {"user": 17}) for path in list(POSTS)[:3]],
        ("/v1/chat/completions", {"top_logprobs": 0}),
        ("/v1/chat/completions", {"top_logprobs": 0, "logprobs": False}),
        ("/v1/chat/completions", {"logprobs": None, "top_logprobs": None}),
        ("/v1/chat/completions", {"n": None, "stop": None, "logit_bias": None, "tools": None, "tool_choice": None}),
        ("/v1/chat/completions", {"stream_options": {}}),
        ("/v1/chat/completions", {"stream_options": {"include_usage": False}}),
        ("/v1/chat/completions", {"n": 1.0, "max_tokens": 2.0, "top_k": 5.0, "min_tokens": 0.0}),
        ("/v1/completions", {"logprobs": 1.0, "best_of": 1.0, "stop_token_ids": [5.0]}),
        ("/v1/messages", {"top_k": 5.0, "max_tokens": 2.0}),
        *[("/v1/completions", {"stop": stop}) for stop in ("", [], [""], ["", "zzz"], None)],
        ("/v1/completions", {"logit_bias": {"5": 1}}),
        ("/v1/completions", {"logit_bias": {}}),
    ],
)
async def test_what_asks_for_nothing_strange_is_answered(
    http: httpx.AsyncClient, path: str, change: dict[str, Any]
) -> None:
    answer = await http.post(path, json={**POSTS[path], **change})
    assert answer.status_code == 200, answer.text


async def test_metadata_comes_back_in_texts(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/responses", json={"input": "abc", "metadata": {"n": 1, "is": True, "s": "text"}})
    assert answer.json()["metadata"] == {"n": "1", "is": "true", "s": "text"}


@pytest.mark.parametrize("path", list(POSTS)[:4])
async def test_a_seed_of_minus_one_is_any_seed_and_one_beyond_63_bits_is_one(
    http: httpx.AsyncClient, backend: FakeBackend, path: str
) -> None:
    for seed in (-1, -1, 2**64 - 5, 2**64 - 5, 7):
        await http.post(path, json={**POSTS[path], "seed": seed})
    any_1, any_2, big_1, big_2, small = (request.sampling.seed for request in backend.requests)
    assert any_1 != any_2
    assert big_1 == big_2 == -5
    assert small == 7
    assert [request.is_seeded for request in backend.requests] == [False, False, True, True, True]


async def test_a_nucleus_of_nothing_is_the_likeliest_token(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    await http.post("/v1/completions", json={"prompt": "abc", "top_p": 0})
    assert 0 < backend.requests[0].sampling.top_p < 1e-6


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON;charset=UTF8"])
@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
async def test_a_byte_order_mark_and_a_charset_change_nothing(
    http: httpx.AsyncClient, content_type: str, mark: bytes
) -> None:
    content = mark + json.dumps({"prompt": "é", "max_tokens": 2}, ensure_ascii=False).encode()
    answer = await http.post("/v1/completions", content=content, headers={"content-type": content_type})
    assert answer.status_code == 200, answer.text


async def test_another_charset_is_refused_by_name(http: httpx.AsyncClient) -> None:
    headers = {"content-type": "application/json; charset=UTF-16"}
    answer = await http.post("/v1/completions", content=json.dumps({"prompt": "a"}).encode("utf-16"), headers=headers)
    assert answer.status_code == 400
    assert "utf-16" in answer.json()["error"]["message"]


async def test_a_model_answers_to_its_aliases_by_the_name_that_was_asked(service: GenerationService) -> None:
    service.config = service.config.model_copy(update={"model_aliases": ("gpt-4o", "claude/sonnet")})
    transport = httpx.ASGITransport(build_app(service, ApiKeys()))
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as http:
        listed = [entry["id"] for entry in (await http.get("/v1/models")).json()["data"]]
        assert listed == ["fake", "gpt-4o", "claude/sonnet"]
        for name in listed:
            assert (await http.get(f"/v1/models/{name}")).json()["id"] == name
            for path in list(POSTS)[:4]:
                assert (await http.post(path, json={**POSTS[path], "model": name})).json()["model"] == name
            assert (await http.post("/tokenize", json={"model": name, "prompt": "a"})).status_code == 200
        assert (await http.post("/v1/completions", json={"prompt": "abc"})).json()["model"] == "fake"
        unknown = await http.post("/v1/completions", json={"model": "gpt-5", "prompt": "abc"})
        assert unknown.status_code == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Basic dXNlcjpwYXNz", "x-api-key": "secret"}, 200),
        ({"authorization": "", "x-api-key": "secret"}, 200),
        ({"authorization": "Bearer secret", "x-api-key": "other"}, 200),
        ({"authorization": "Bearer other", "x-api-key": "secret"}, 200),
        ({"authorization": "Basic dXNlcjpwYXNz", "x-api-key": "other"}, 401),
        ({"authorization": "Basic dXNlcjpwYXNz"}, 401),
        ({"x-api-key": "secret"}, 200),
    ],
)
async def test_what_is_left_of_another_log_in_does_not_hide_a_key(
    service: GenerationService, headers: dict[str, str], status: int
) -> None:
    transport = httpx.ASGITransport(build_app(service, api_keys("secret")))
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as http:
        assert (await http.get("/v1/models", headers=headers)).status_code == status
