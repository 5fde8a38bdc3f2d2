"""The service of vLLM's engine, by the messages of the smg router's own package."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from router.api_keys import ApiKeys
from router.generation.generation_service import GenerationService
from tests.router.fixtures.fake_backend import FakeBackend, say
from tests.router.fixtures.grpc_channel import grpc_channel
from tests.router.fixtures.key_files import api_keys
from tests.router.openai.test_messages import spoken

pb2 = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2", reason="pip install 'outrider[smg]'")
stubs = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2_grpc", reason="pip install 'outrider[smg]'")
common = pytest.importorskip("smg_grpc_proto.generated.common_pb2", reason="pip install 'outrider[smg]'")
engine = pytest.importorskip("router.grpc_api.vllm_engine", reason="pip install 'outrider[smg]'")


@pytest.fixture
async def stub(
    service: GenerationService, tmp_path_factory: pytest.TempPathFactory, backend: FakeBackend
) -> AsyncIterator[Any]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    config = service.config.model_copy(update={"model_path": str(folder)})
    own = GenerationService(backend, service.files, config, service.metrics)
    async with grpc_channel(own, add_more=engine.VllmEngineApi(own, ApiKeys()).add_to) as channel:
        yield stubs.VllmEngineStub(channel)


def ask(*, stream: bool = False, **params: Any) -> Any:
    tokens = pb2.TokenizedInput(input_ids=spoken("hi")[:-1])
    return pb2.GenerateRequest(
        request_id="a", tokenized=tokens, stream=stream, sampling_params=pb2.SamplingParams(**params)
    )


async def test_tokens_come_in_pieces_and_whole(stub: Any, backend: FakeBackend) -> None:
    wanted = spoken("yes, and more")
    backend.next_token = say(*wanted)
    request = ask(stream=True, n=2, logprobs=1, temperature=0.5, top_k=3, seed=4, max_tokens=40)
    answers = [answer async for answer in stub.Generate(request)]
    chunks = [answer.chunk for answer in answers if answer.HasField("chunk")]
    wholes = [answer.complete for answer in answers if answer.HasField("complete")]
    assert sorted(whole.index for whole in wholes) == [0, 1]
    for whole in wholes:
        assert (list(whole.output_ids), whole.finish_reason, whole.prompt_tokens) == (wanted, "stop", 2)
        assert len(whole.output_logprobs.token_logprobs) == len(whole.output_logprobs.top_logprobs) == len(wanted)
        pieces = [chunk for chunk in chunks if chunk.index == whole.index]
        assert [token for chunk in pieces for token in chunk.token_ids] == wanted
        assert pieces[-1].completion_tokens == len(wanted)
    sampling = backend.requests[0].sampling
    assert (sampling.temperature, sampling.top_k) == (0.5, 3)
    [only] = [answer async for answer in stub.Generate(ask(max_tokens=3))]
    assert (list(only.complete.output_ids), only.complete.finish_reason) == (wanted[:3], "length")


async def test_fields_that_are_not_set_keep_the_models_defaults(stub: Any, backend: FakeBackend) -> None:
    backend.next_token = say(*spoken("yes"))
    [only] = [answer async for answer in stub.Generate(ask(stop=["es"]))]
    assert only.complete.matched_stop_str == "es"
    sampling = backend.requests[0].sampling
    assert (sampling.top_p, sampling.repetition_penalty, sampling.max_tokens) == (1, 1, 126)


@pytest.mark.parametrize("asked", [127, 32_000, 2**32 - 1])
async def test_more_tokens_than_fit_are_those_that_fit(stub: Any, backend: FakeBackend, asked: int) -> None:
    [only] = [answer async for answer in stub.Generate(ask(max_tokens=asked))]
    assert (only.complete.finish_reason, len(only.complete.output_ids)) == ("length", 126)
    assert backend.requests[0].sampling.max_tokens == 126


async def test_constraints_reach_the_engine(stub: Any, backend: FakeBackend) -> None:
    for constraint in (
        {"json_schema": '{"type": "integer"}'},
        {"regex": "a+"},
        {"choice": pb2.ChoiceConstraint(choices=["b"])},
    ):
        [_] = [answer async for answer in stub.Generate(ask(max_tokens=1, **constraint))]
        assert backend.requests[-1].sampling.grammar is not None


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (lambda: ask(max_tokens=1, structural_tag="{}"), "structural_tag"),
        (lambda: ask(max_tokens=1, top_p=2), "top_p"),
        (lambda: pb2.GenerateRequest(sampling_params=pb2.SamplingParams(max_tokens=1)), "prompt"),
        (lambda: pb2.GenerateRequest(text="a", media_refs=pb2.MediaRefs()), "media_refs"),
    ],
)
async def test_what_is_not_done_is_refused(stub: Any, request_: Any, said: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=said) as caught:
        [_ async for _ in stub.Generate(request_())]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_call_is_ended_by_its_id(stub: Any, backend: FakeBackend) -> None:
    backend.step_s = 0.05
    call = stub.Generate(ask(stream=True, max_tokens=120, ignore_eos=True))
    answers = aiter(call)
    await anext(answers)
    assert (await stub.GetLoads(pb2.GetLoadsRequest())).loads[0].num_running_reqs == 1
    await stub.Abort(pb2.AbortRequest(request_ids=["a", "unknown"]))
    rest = [answer async for answer in answers]
    assert rest[-1].complete.finish_reason == "abort"
    assert 0 < len(rest[-1].complete.output_ids) < 120
    assert (await stub.GetServerInfo(pb2.GetServerInfoRequest())).active_requests == 0
    assert backend.num_running == 0


async def test_a_call_is_ended_by_its_own_tenant_alone(service: GenerationService, backend: FakeBackend) -> None:
    backend.step_s = 0.05
    keys = api_keys("first tenant=one", "second tenant=other", "third admin=true")
    async with grpc_channel(service, keys, engine.VllmEngineApi(service, keys).add_to) as channel:
        stub = stubs.VllmEngineStub(channel)

        async def reasons(calls: tuple[str, ...], aborting: str) -> list[str]:
            """Return how calls of one id end, by their clients' keys, after this one has ended its own."""
            running = [
                aiter(stub.Generate(ask(stream=True, max_tokens=40, ignore_eos=True), metadata=(("x-api-key", key),)))
                for key in calls
            ]
            for each in running:
                await anext(each)
            await stub.Abort(pb2.AbortRequest(request_ids=["a"]), metadata=(("x-api-key", aborting),))
            return [[answer async for answer in each][-1].complete.finish_reason for each in running]

        assert await reasons(("first", "first", "second"), "second") == ["length", "length", "abort"]
        assert await reasons(("first", "first", "second"), "first") == ["abort", "abort", "length"]


async def test_a_folder_is_named_to_admins_alone_and_nothing_without_a_key(service: GenerationService) -> None:
    keys = api_keys("first tenant=one", "third admin=true")
    async with grpc_channel(service, keys, engine.VllmEngineApi(service, keys).add_to) as channel:
        stub = stubs.VllmEngineStub(channel)
        for key, path in (("first", "fake"), ("third", service.config.model_path)):
            info = await stub.GetModelInfo(pb2.GetModelInfoRequest(), metadata=(("x-api-key", key),))
            assert info.model_path == info.tokenizer_path == path
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.HealthCheck(pb2.HealthCheckRequest())
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_the_router_learns_what_is_served(stub: Any) -> None:
    assert (await stub.HealthCheck(pb2.HealthCheckRequest())).healthy
    info = await stub.GetModelInfo(pb2.GetModelInfoRequest())
    assert (info.served_model_name, info.max_context_length, info.is_generation) == ("fake", 128, True)
    assert (await stub.GetServerInfo(pb2.GetServerInfoRequest())).server_type == "vllm-grpc"
    chunks = [chunk async for chunk in stub.GetTokenizer(common.GetTokenizerRequest())]
    archive = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(archive).hexdigest()
    assert zipfile.ZipFile(io.BytesIO(archive)).namelist() == ["tokenizer.json"]
    with pytest.raises(grpc.aio.AioRpcError, match="no embeddings"):
        await stub.Embed(pb2.EmbedRequest())
