"""Requests for reasoning steps that are not exact: conditions, refusals, and the mark of their answers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    ScorerKind,
    SpeculationConfig,
    StepConfig,
)
from engine.engine_core.loading import load_engine
from engine.proposer.draft_model.model_proposer import ModelProposer
from protos import outrider_pb2 as pb2
from protos import outrider_pb2_grpc
from protos.messages import SpeculationParams
from router.api_keys import ApiKeys
from router.config import IngressConfig
from router.generation.generation_service import GenerationService
from router.metrics.ingress_metrics import IngressMetrics
from router.openai.api import build_app
from router.tokenizer.tokenizer_files import load_tokenizer_files
from tests.engine.fixtures.byte_tokenizer import BYTE_VOCAB_SIZE, write_tokenizer
from tests.engine.fixtures.checkpoints import write_checkpoint
from tests.router.fixtures.engine_backend import CARD, EngineBackend
from tests.router.fixtures.fake_backend import CARD as FAKE_CARD
from tests.router.fixtures.fake_backend import FakeBackend
from tests.router.grpc_api.test_grpc_api import channel, stub  # noqa: F401  (fixtures)

ALLOWED = replace(FAKE_CARD, has_approximate_steps=True)
WISH = {"mode": "approximate"}
BODY = {"model": "fake", "prompt": "x", "max_tokens": 4}


@pytest.fixture
def backend() -> FakeBackend:
    return FakeBackend(card=ALLOWED)


async def test_the_wish_reaches_the_engine_and_the_answer_is_marked(
    http: httpx.AsyncClient, backend: FakeBackend
) -> None:
    body = {**BODY, "speculation": {**WISH, "threshold": 8}}
    answer = (await http.post("/v1/completions", json=body)).json()
    assert backend.requests[0].speculation == SpeculationParams(is_approximate=True, threshold=8.0)
    assert answer["x_speculation"]["exact"] is False


@pytest.mark.parametrize("wish", [None, {}, {"mode": "exact"}, {"enabled": True, "num_tokens": 2}])
async def test_nothing_but_the_word_itself_asks_for_it(
    http: httpx.AsyncClient, backend: FakeBackend, wish: dict[str, Any] | None
) -> None:
    answer = (await http.post("/v1/completions", json={**BODY, "speculation": wish})).json()
    assert not backend.requests[0].speculation.is_approximate
    assert "x_speculation" not in answer


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seed": 7}, "does not go with seed 7"),
        ({"logprobs": 0}, "does not go with logprobs"),
        ({"guided_regex": "a+"}, "does not go with guided_regex"),
        ({"response_format": {"type": "json_object"}}, "does not go with response_format"),
        ({"n": 2}, "does not go with 2 choices"),
        ({"prompt": ["x", "y"]}, "does not go with 2 choices"),
        ({"prediction": {"type": "content", "content": "y"}}, "does not go with prediction"),
        ({"speculation": {**WISH, "enabled": False}}, "switched off"),
        ({"speculation": {**WISH, "num_tokens": 0}}, "switched off"),
        ({"speculation": {**WISH, "method": "none"}}, "switched off"),
        ({"speculation": {**WISH, "threshold": 9.5}}, "9"),
        ({"speculation": {"mode": "fast"}}, "exact"),
        ({"speculation": {"threshold": 5}}, "speculation.mode is not 'approximate'; leave it out or set the mode"),
    ],
)
async def test_parameters_that_a_draft_could_not_keep_are_refused(
    http: httpx.AsyncClient, backend: FakeBackend, changes: dict[str, Any], words: str
) -> None:
    answer = await http.post("/v1/completions", json={**BODY, "speculation": WISH, **changes})
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert words in error["message"]
    assert error["param"].startswith("speculation")
    assert backend.requests == []


async def test_a_deployment_that_does_not_allow_it_says_so(http: httpx.AsyncClient, backend: FakeBackend) -> None:
    backend.card = FAKE_CARD
    answer = await http.post("/v1/completions", json={**BODY, "speculation": WISH})
    assert answer.status_code == 400
    assert "an operator allows it with speculation.steps" in answer.json()["error"]["message"]


async def test_every_chunk_of_a_stream_is_marked(http: httpx.AsyncClient) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4, "stream": True}
    answer = await http.post("/v1/chat/completions", json={**body, "speculation": WISH})
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert len(chunks) > 2
    assert all(chunk["x_speculation"]["exact"] is False for chunk in chunks)


async def test_grpc_marks_and_refuses_alike(stub: outrider_pb2_grpc.GenerationStub) -> None:  # noqa: F811
    wish = pb2.Speculation(mode="approximate", threshold=3)
    request = pb2.GenerateRequest(model="fake", prompt="x", max_tokens=4, speculation=wish)
    whole = await stub.Generate(request)
    chunks = [chunk async for chunk in stub.GenerateStream(request)]
    assert whole.HasField("x_speculation")
    assert all(chunk.HasField("x_speculation") and not chunk.x_speculation.exact for chunk in chunks)
    exact = await stub.Generate(pb2.GenerateRequest(model="fake", prompt="x", max_tokens=4))
    assert not exact.HasField("x_speculation")
    request.seed = 7
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "does not go with seed 7" in (caught.value.details() or "")


class StepBackend(EngineBackend):
    """A real engine with a draft that may write steps."""

    def __init__(self, folder: Path) -> None:
        steps = StepConfig(0.0, ScorerKind.LIKELIHOOD, max_step_tokens=8)
        cache = CacheConfig(num_blocks=64, memory_bytes=None)
        config = EngineConfig(
            ModelConfig(str(folder / "target"), dtype="float32"), cache, speculation=SpeculationConfig(3, steps=steps)
        )
        draft = ModelConfig(str(folder / "draft"), dtype="float32")
        super().__init__(load_engine(config, ModelProposer.from_config(draft, cache, SchedulerConfig())))

    async def describe(self):
        return replace(CARD, has_approximate_steps=True, max_draft_tokens=16)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    for name, noise in (("target", 0.0), ("draft", 0.05)):
        write_checkpoint(tmp_path / name, seed=0, noise=noise, vocab_size=BYTE_VOCAB_SIZE)
        write_tokenizer(tmp_path / name)
    files = load_tokenizer_files(str(tmp_path / "target"))
    service = GenerationService(
        StepBackend(tmp_path), files, IngressConfig(model_id="tiny", model_path=""), IngressMetrics()
    )
    transport = httpx.ASGITransport(build_app(service, ApiKeys()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://outrider") as client:
        yield client


async def test_steps_are_drafted_through_http_and_counted_in_the_answer(served: httpx.AsyncClient) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    plain = (await served.post("/v1/completions", json=body)).json()
    answer = (await served.post("/v1/completions", json={**body, "speculation": WISH})).json()
    mark = answer["x_speculation"]
    assert (mark["exact"], mark["steps_rejected"]) == (False, 0)
    assert mark["steps_from_draft"] >= 4
    assert mark["tokens_from_draft"] >= 32
    assert answer["usage"]["completion_tokens"] == 40
    assert answer["choices"][0]["text"] != plain["choices"][0]["text"]
    again = (await served.post("/v1/completions", json=body)).json()
    assert again["choices"] == plain["choices"], "who does not ask is not touched"
