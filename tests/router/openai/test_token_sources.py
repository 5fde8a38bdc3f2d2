"""Sources of tokens, reasons of plain passes and unverified drafts, from HTTP and gRPC down to a real engine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.engine_core import EngineCore
from protos import outrider_pb2 as pb2
from protos import outrider_pb2_grpc
from protos.messages import GenerateRequest, TokenChunk
from protos.served_model import ModelCard
from router.api_keys import ApiKeys
from router.config import IngressConfig
from router.generation.generation_service import GenerationService
from router.metrics.ingress_metrics import IngressMetrics
from router.openai.api import build_app
from router.tokenizer.tokenizer_files import load_tokenizer_files
from tests.router.fixtures.engine_backend import CARD, EngineBackend, ngram_engine, write_model
from tests.router.fixtures.grpc_channel import grpc_channel

REQUEST = {"model": "tiny", "prompt": "abcabcabcabcabc", "max_tokens": 40, "temperature": 0, "return_token_ids": True}
WORDS = {"guided_regex": "(abcabcabcabc ){6}"}
ASKED = {**REQUEST, **WORDS, "return_token_sources": True, "speculation": {"explain": True}}


class ChunkByChunk(EngineBackend):
    """Hands out drafts before the tokens of the pass that verifies them, as a target process does."""

    def __init__(self, core: EngineCore, card: ModelCard) -> None:
        super().__init__(core, card)
        core.on_drafted = self._show

    def _show(self, drafts: list[TokenChunk]) -> None:
        for chunk in drafts:
            self._chunks[chunk.request_id].append(chunk)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Sequence[TokenChunk], None]:
        async with aclosing(super().generate(request)) as batches:
            async for batch in batches:
                for chunk in batch:
                    yield (chunk,)


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> EngineCore:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    core = ngram_engine(folder)
    core.folder = folder
    return core


@pytest.fixture
def service(core: EngineCore) -> GenerationService:
    backend = ChunkByChunk(core, replace(CARD, fingerprint="or_1", max_draft_tokens=4))
    files = load_tokenizer_files(str(Path(core.folder)))
    return GenerationService(backend, files, IngressConfig(model_id="tiny", model_path="nowhere"), IngressMetrics())


@pytest.fixture
async def http(service: GenerationService) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(build_app(service, ApiKeys()))
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as client:
        yield client


async def stream(http: httpx.AsyncClient, body: dict[str, Any]) -> list[dict[str, Any]]:
    answer = await http.post("/v1/completions", json={**body, "stream": True})
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


async def test_every_token_has_a_source_and_forced_ones_are_named(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/v1/completions", json=ASKED)).json()
    choice = answer["choices"][0]
    assert len(choice["token_sources"]) == len(choice["token_ids"]) > 10
    assert choice["token_sources"][0] == "plain"
    assert {"forced", "bonus"} <= set(choice["token_sources"])
    assert answer["system_fingerprint"].startswith("or_1-")


async def test_an_explanation_counts_the_passes_without_drafts_by_reason(http: httpx.AsyncClient) -> None:
    explained = (await http.post("/v1/completions", json=ASKED)).json()["metrics"]["speculation_explanation"]
    assert explained["plain_passes"]["prompt"] == 1
    assert sum(explained["passes"].values()) > 0
    assert set(explained["reasons"]) == set(explained["plain_passes"])
    off = {**REQUEST, "speculation": {"explain": True, "enabled": False}}
    explained = (await http.post("/v1/completions", json=off)).json()["metrics"]["speculation_explanation"]
    assert explained["passes"] == {}
    assert explained["plain_passes"] == {"off": 40}


async def test_streamed_sources_are_those_of_the_full_answer(http: httpx.AsyncClient) -> None:
    full = (await http.post("/v1/completions", json=ASKED)).json()["choices"][0]
    events = await stream(http, ASKED)
    sources = [source for event in events for choice in event["choices"] for source in choice.get("token_sources", ())]
    assert sources == full["token_sources"]


async def test_nothing_is_told_that_nobody_asked_for(http: httpx.AsyncClient) -> None:
    answer = (await http.post("/v1/completions", json=REQUEST)).json()
    assert "token_sources" not in answer["choices"][0]
    assert "speculation_explanation" not in answer["metrics"]
    assert not any("x_drafts" in event for event in await stream(http, REQUEST))


async def test_unverified_drafts_are_events_apart_and_change_no_text(http: httpx.AsyncClient) -> None:
    plain = await stream(http, {**REQUEST, **WORDS})
    shown = await stream(http, {**REQUEST, **WORDS, "stream_options": {"include_drafts": True}})
    drafts = [event for event in shown if "x_drafts" in event]
    assert drafts
    assert all(event["choices"] == [] for event in drafts)
    assert all(draft["token_ids"] and draft["text"] for event in drafts for draft in event["x_drafts"])

    def text(events: list[dict[str, Any]]) -> str:
        return "".join(choice["text"] for event in events for choice in event["choices"])

    assert text(shown) == text(plain)


async def test_grpc_tells_the_same(service: GenerationService, http: httpx.AsyncClient) -> None:
    fields = {key: value for key, value in ASKED.items() if key != "speculation"}
    request = pb2.GenerateRequest(**fields, speculation=pb2.Speculation(explain=True))
    async with grpc_channel(service) as channel:
        stub = outrider_pb2_grpc.GenerationStub(channel)
        answer = await stub.Generate(request, timeout=30)
        request.include_drafts = True
        chunks = [chunk async for chunk in stub.GenerateStream(request, timeout=30)]
    full = (await http.post("/v1/completions", json=ASKED)).json()
    assert list(answer.choices[0].token_sources) == full["choices"][0]["token_sources"]
    assert dict(answer.usage.explanation.plain_passes) == full["metrics"]["speculation_explanation"]["plain_passes"]
    assert answer.system_fingerprint.startswith("or_1-")
    assert [source for chunk in chunks for source in chunk.token_sources] == full["choices"][0]["token_sources"]
    assert any(chunk.HasField("drafts") and not chunk.text and not chunk.token_ids for chunk in chunks)
