"""The endpoints around generation, and the wire form of streams."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from protos.errors import ConflictError, UnavailableError
from protos.served_model import (
    CanaryOutcome,
    CanaryReport,
    CheckDraft,
    DraftReport,
    ShowDraft,
    StopCanary,
    SwapDraft,
    TryDraft,
)
from router.api_keys import ApiKeys
from router.generation.generation_service import GenerationService
from router.openai.api import build_app
from router.tokenizer import Tokenizer
from tests.router.fixtures import key_files
from tests.router.fixtures.fake_backend import FakeBackend


async def test_the_model_is_listed_and_found(client: openai.AsyncOpenAI) -> None:
    [model] = (await client.models.list()).data
    assert (model.id, model.owned_by, model.max_model_len) == ("fake", "outrider", 128)
    assert await client.models.retrieve("fake") == model


async def test_text_becomes_tokens_and_text_again(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/tokenize", json={"prompt": "aé", "return_token_strs": True})).json()
    assert answer == {"count": 3, "max_model_len": 128, "tokens": [98, 196, 170], "token_strs": ["a", "Ã", "©"]}
    assert (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json() == {"prompt": "aé"}


async def test_no_text_is_no_tokens(http: httpx.AsyncClient) -> None:
    tokens = (await http.post("/tokenize", json={"prompt": ""})).json()["tokens"]
    assert tokens == []
    assert (await http.post("/detokenize", json={"tokens": tokens})).json() == {"prompt": ""}


async def test_a_chat_becomes_the_tokens_that_generation_would_see(http: httpx.AsyncClient) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = (await http.post("/tokenize", json={"model": "fake", "messages": messages})).json()
    assert (await http.post("/detokenize", json={"tokens": answer["tokens"]})).json() == {
        "prompt": "[user]hi[assistant]"
    }


async def test_tokenize_wants_one_source_and_detokenize_known_tokens(http: httpx.AsyncClient) -> None:
    assert (await http.post("/tokenize", json={})).status_code == 400
    assert "999" in (await http.post("/detokenize", json={"tokens": [999]})).json()["error"]["message"]


async def test_a_stream_is_server_sent_events(base_url: str) -> None:
    body = {"model": "fake", "prompt": "abc", "max_tokens": 4, "stream": True}
    async with httpx.AsyncClient() as http:
        answer = await http.post(f"{base_url}/completions", json=body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, end = answer.text.split("\n\n")
    assert end == ""
    assert events[-1] == "data: [DONE]"
    chunk = json.loads(events[0].removeprefix("data: "))
    assert chunk["choices"] == [{"index": 0, "text": "de", "finish_reason": None, "logprobs": None}]
    assert chunk["object"] == "text_completion"


async def test_health_is_that_of_the_pairs(http: httpx.AsyncClient) -> None:
    assert (await http.get("/health")).json() == {"status": "ok"}


async def test_metrics_are_the_ingress_s_and_the_pairs(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.texts = [
        "# HELP outrider_kv_cache_usage u\n# TYPE outrider_kv_cache_usage gauge\noutrider_kv_cache_usage 0.5\n"
    ] * 2
    await http.post("/v1/completions", json={"model": "fake", "prompt": "abc", "max_tokens": 6})
    await http.get("/v1/invented")
    answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert samples["outrider_time_to_first_token_seconds_count", ()] == 1
    assert samples["outrider_inter_token_latency_seconds_count", ()] == 4
    assert samples["outrider_kv_cache_usage", (("replica", "1"),)] == 0.5
    served = (("face", "http"), ("operation", "/v1/completions"), ("status", "200"))
    assert samples["outrider_requests_total", served] == 1
    ended = (("finished_reason", "length"),)
    assert samples["outrider_request_success_total", ended] == 1
    assert samples["vllm:request_success_total", (*ended, ("model_name", "fake"))] == 1
    assert samples["outrider_e2e_request_latency_seconds_count", ()] == 1
    end_to_end_s = samples["outrider_e2e_request_latency_seconds_sum", ()]
    assert 0 < samples["outrider_request_decode_time_seconds_sum", ()] < end_to_end_s
    assert samples["outrider_request_time_per_output_token_seconds_count", ()] == 1
    assert samples["outrider_request_prompt_tokens_sum", ()] == 3
    assert samples["outrider_generation_tokens_total", ()] == 6
    unknown = (("face", "http"), ("operation", "other"), ("status", "404"))
    assert samples["outrider_requests_total", unknown] == 1


async def test_metrics_do_not_need_the_pairs(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    async def metrics_texts() -> None:
        raise UnavailableError("no pair")

    backend.metrics_texts = metrics_texts
    assert "outrider_time_to_first_token_seconds" in (await http.get("/metrics")).text


@pytest.mark.parametrize(("path", "method"), [("/health", "describe"), ("/metrics", "metrics_texts")])
async def test_a_flood_of_probes_asks_the_pairs_once(
    http: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch, path: str, method: str
) -> None:
    """Whoever reaches the port may ask, without a key."""
    answer, num_asked = getattr(backend, method), 0

    async def counted() -> object:
        nonlocal num_asked
        num_asked += 1
        return await answer()

    monkeypatch.setattr(backend, method, counted)
    answers = await asyncio.gather(*(http.get(path) for _ in range(200)))
    assert {answer.status_code for answer in answers} == {200}
    assert num_asked <= 5


async def test_a_long_prompt_is_read_beside_the_event_loop(
    http: httpx.AsyncClient, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode, threads = Tokenizer.encode, []

    def recorded(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.current_thread())
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", recorded)
    backend.card = replace(backend.card, max_model_len=18_000)
    for text in ("ab " * 6000, "ab"):
        assert (await http.post("/tokenize", json={"prompt": text})).json()["count"] == len(text)
    assert [thread is threading.current_thread() for thread in threads] == [False, True]


async def test_an_admin_kills_the_drafts(backend: FakeBackend, service: GenerationService, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("user\nboss admin=true\n", encoding="utf-8")
    closed, keys, opened = ApiKeys(), ApiKeys(str(tmp_path / "keys")), ApiKeys(is_open_admin=True)
    backend.num_drafts_to_kill = 2
    for api_keys, key, status in ((closed, "", 403), (keys, "user", 403), (keys, "boss", 200), (opened, "", 200)):
        async with app_client(service, api_keys, key) as http:
            answer = await http.post("/admin/drafts/kill", json={})
        assert answer.status_code == status, answer.text
    assert answer.json() == {"num_drafts": 2}


async def test_a_draft_is_not_killed_by_a_form_of_another_site_nor_where_there_is_none(
    backend: FakeBackend, service: GenerationService
) -> None:
    async with app_client(service, ApiKeys(is_open_admin=True), "") as http:
        form = await http.post("/admin/drafts/kill", content="{}", headers={"Content-Type": "text/plain"})
        none = await http.post("/admin/drafts/kill", json={})
    assert (form.status_code, none.status_code) == (400, 400)
    assert "application/json" in form.json()["error"]["message"]
    assert "nothing to kill" in none.json()["error"]["message"]


DRAFT = DraftReport("pair-1", "/models/new", "0011aabb", 1700000000.5, is_deployed=False)


async def test_an_admin_exchanges_the_drafts_once_all_pairs_find_them_fit(
    backend: FakeBackend, service: GenerationService
) -> None:
    backend.drafts = [DRAFT]
    for is_open, status in ((False, 403), (True, 200)):
        async with app_client(service, ApiKeys(is_open_admin=is_open), "") as http:
            listed = await http.get("/admin/drafts")
            answer = await http.post("/admin/drafts/swap", json={"path": "/models/new", "wait_s": 5})
        assert (listed.status_code, answer.status_code) == (status, status)
    assert backend.draft_orders == [ShowDraft(), CheckDraft("/models/new"), SwapDraft("/models/new", 5.0)]
    draft = {"name": "new", "method": "model", "digest": "0011aabb", "since": 1700000000, "is_deployed": False}
    assert answer.json() == listed.json() == {"drafts": [{**draft, "replica": "pair-1", "path": "/models/new"}]}
    backend.card = replace(backend.card, draft=DRAFT)
    async with app_client(service, ApiKeys(), "") as http:
        assert (await http.get("/health")).json()["draft"] == draft


async def test_an_admin_tries_a_draft_and_stops_the_trial(backend: FakeBackend, service: GenerationService) -> None:
    canary = CanaryReport("/models/new", "/models/old", CanaryOutcome.RUNNING, "", 2, 0.1)
    backend.drafts = [replace(DRAFT, canary=canary)]
    for is_open, status in ((False, 403), (True, 200)):
        async with app_client(service, ApiKeys(is_open_admin=is_open), "") as http:
            answer = await http.post("/admin/drafts/canary", json={"path": "/models/new", "block_s": 4})
            stopped = await http.post("/admin/drafts/canary/stop", json={})
        assert (answer.status_code, stopped.status_code) == (status, status)
    order = TryDraft("/models/new", block_s=4.0)
    assert backend.draft_orders == [CheckDraft("/models/new"), order, ShowDraft(), StopCanary()]
    told = {"name": "new", "old_name": "old", "outcome": "running", "reason": "", "num_pairs": 2, "gain": 0.1}
    assert answer.json()["drafts"][0]["canary"] == {**told, "low": None, "high": None}
    backend.drafts = [DRAFT]
    async with app_client(service, ApiKeys(is_open_admin=True), "") as http:
        assert "nothing to stop" in (await http.post("/admin/drafts/canary/stop", json={})).text


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"path": "models/new"}, "path"),
        ({}, "path"),
        ({"path": "/a", "wait_s": 0}, "wait_s"),
        ({"path": "/a", "wait": 5}, "wait"),
    ],
)
async def test_a_swap_of_drafts_with_a_wrong_body_is_refused(
    backend: FakeBackend, service: GenerationService, body: dict[str, object], text: str
) -> None:
    async with app_client(service, ApiKeys(is_open_admin=True), "") as http:
        answer = await http.post("/admin/drafts/swap", json=body)
    assert (answer.status_code, backend.draft_orders) == (400, [])
    assert text in answer.json()["error"]["message"]


async def test_a_second_swap_of_drafts_is_a_conflict(backend: FakeBackend, service: GenerationService) -> None:
    backend.draft_failure = ConflictError("under way")
    async with app_client(service, ApiKeys(is_open_admin=True), "") as http:
        answer = await http.post("/admin/drafts/swap", json={"path": "/a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")


async def test_every_route_asks_for_a_key_but_those_that_the_docs_list(service: GenerationService) -> None:
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text(encoding="utf-8")
    listed = page.partition("## Without a key")[2].partition("\nPrometheus")[0]
    rows = [line.split("|")[1] for line in listed.splitlines() if line.startswith("| `")]
    documented = {path for row in rows for path in re.findall(r"`([^`]+)`", row)}
    app = build_app(service, key_files.api_keys("sesame"))
    found = set()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        for route in app.routes:
            assert isinstance(route, Route), "a mounted application asks for no key of ours"
            path = re.sub(r"\{[^}]*\}", "index.html", route.path)
            for method in route.methods or ():
                answer = await http.request(method, path, headers={"Authorization": "Bearer wrong"}, json={})
                if answer.status_code != httpx.codes.UNAUTHORIZED:
                    found.add(route.path)
    assert found == {path for path in documented if not path.startswith("/-/")}


def app_client(service: GenerationService, api_keys: ApiKeys, key: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(service, api_keys), raise_app_exceptions=False)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.AsyncClient(transport=transport, base_url="http://outrider", headers=headers)
