"""The gRPC frontend on a real grpc.aio server."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import outrider_pb2 as pb2
from protos import outrider_pb2_grpc
from protos.errors import EngineError, OverloadedError, PermissionDeniedError, UnavailableError
from protos.messages import SpeculationMethod, VerifyMode
from router.api_keys import ApiKeys
from router.generation.generation_service import GenerationService
from router.grpc_api import api as grpc_api
from router.grpc_api.api import SERVICE_NAME, GrpcApi
from router.grpc_api.callers import LOCAL_PROXY
from tests.router.fixtures.fake_backend import FakeBackend, say
from tests.router.fixtures.grpc_channel import grpc_channel
from tests.router.fixtures.key_files import api_keys


@pytest.fixture
async def channel(service: GenerationService) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc_channel(service) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> outrider_pb2_grpc.GenerationStub:
    return outrider_pb2_grpc.GenerationStub(channel)


def ids(text: str) -> list[int]:
    return [byte + 1 for byte in text.encode()]


async def test_generate_answers_whole(stub: outrider_pb2_grpc.GenerationStub) -> None:
    answer = await stub.Generate(pb2.GenerateRequest(model="fake", prompt="abc", max_tokens=5, n=2))
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
        (0, "defgh", "length"),
        (1, "efghi", "length"),
    ]
    assert list(answer.choices[0].token_ids) == ids("defgh")
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, usage.cached_tokens) == (3, 10, 13, 1)
    assert usage.accepted_prediction_tokens == 0
    assert usage.speculative_decoding.num_accepted_draft_tokens == 4
    assert usage.speculative_decoding.acceptance_histogram == {1: 6}


async def test_generate_stream_answers_in_pieces(stub: outrider_pb2_grpc.GenerationStub) -> None:
    request = pb2.GenerateRequest(model="fake", prompt_token_ids=ids("abc"), max_tokens=5, logprobs=1)
    chunks = [chunk async for chunk in stub.GenerateStream(request)]
    assert [chunk.text for chunk in chunks] == ["de", "fg", "h"]
    assert [chunk.finish_reason for chunk in chunks] == ["", "", "length"]
    assert [chunk.HasField("usage") for chunk in chunks] == [False, False, True]
    assert chunks[0].logprobs[0].top[0].token_id == ids("d")[0]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_several_choices_stream_with_their_index(stub: outrider_pb2_grpc.GenerationStub) -> None:
    texts = ["", ""]
    async for chunk in stub.GenerateStream(pb2.GenerateRequest(model="fake", prompt="abc", max_tokens=4, n=2)):
        texts[chunk.index] += chunk.text
    assert texts == ["defg", "efgh"]


async def test_every_field_reaches_the_engine(stub: outrider_pb2_grpc.GenerationStub, backend: FakeBackend) -> None:
    await stub.Generate(
        pb2.GenerateRequest(
            model="fake",
            prompt="abc",
            max_tokens=9,
            min_tokens=2,
            seed=-4,
            temperature=0,
            top_p=0.9,
            top_k=4,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=0.1,
            frequency_penalty=0.2,
            logit_bias={7: 3, 5: -100},
            bad_words=["no"],
            stop_token_ids=[9],
            ignore_eos=True,
            logprobs=0,
            cache_salt="tenant",
            priority=-3,
            timeout_s=30,
            user="me",
            speculation=pb2.Speculation(enabled=False, num_tokens=2, verify="block", method="ngram"),
        )
    )
    [request] = backend.requests
    sampling = request.sampling
    assert (sampling.seed, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (
        -4,
        0.0,
        4,
        0.9,
        0.05,
    )
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.1, 0.2)
    assert sampling.logit_bias == ((5, -100.0), (7, 3.0))
    assert sampling.stop_token_ids == (9,)
    assert (sampling.min_tokens, sampling.max_tokens, sampling.num_logprobs) == (2, 9, 0)
    assert (request.speculation.enabled, request.speculation.verify) == (False, VerifyMode.BLOCK)
    assert request.speculation.method == SpeculationMethod.NGRAM
    assert (request.cache_salt, request.priority) == ("tenant", -3)
    assert request.session_id == hashlib.sha256(b"me").hexdigest()[:32]
    assert 29 < request.timeout_s <= 30


async def test_stop_and_echo_work_as_over_http(stub: outrider_pb2_grpc.GenerationStub) -> None:
    answer = await stub.Generate(
        pb2.GenerateRequest(model="fake", prompt="abc", stop=["fg"], echo=True, return_token_ids=False)
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("abcde", "stop")
    assert list(answer.choices[0].token_ids) == []


async def test_an_echo_s_logprobs_stand_beside_its_tokens(stub: outrider_pb2_grpc.GenerationStub) -> None:
    request = pb2.GenerateRequest(model="fake", prompt="abc", max_tokens=2, echo=True, logprobs=0)
    choice = (await stub.Generate(request)).choices[0]
    streamed = [each async for chunk in stub.GenerateStream(request) for each in chunk.logprobs]
    for logprobs in (choice.logprobs, streamed):
        assert [each.token_id for each in logprobs] == list(choice.token_ids) == ids("abcde")
        assert [each.HasField("logprob") for each in logprobs] == [False, True, True, True, True]


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (pb2.GenerateRequest(model="other", prompt="a"), "NOT_FOUND", ["'other'", "'fake'"]),
        (pb2.GenerateRequest(model="fake"), "INVALID_ARGUMENT", ["prompt"]),
        (pb2.GenerateRequest(model="fake", prompt=""), "INVALID_ARGUMENT", ["empty"]),
        (pb2.GenerateRequest(model="fake", prompt="a", prompt_token_ids=[1]), "INVALID_ARGUMENT", ["send one"]),
        (pb2.GenerateRequest(model="fake", prompt_token_ids=[1, 300]), "INVALID_ARGUMENT", ["300"]),
        (pb2.GenerateRequest(model="fake", prompt="a", temperature=float("nan")), "INVALID_ARGUMENT", ["nan"]),
        (pb2.GenerateRequest(model="fake", prompt="a", top_p=1.5), "INVALID_ARGUMENT", ["top_p", "1.5", "at most 1"]),
        (pb2.GenerateRequest(model="fake", prompt="a" * 130, max_tokens=5), "INVALID_ARGUMENT", ["128", "130 tokens"]),
        (pb2.GenerateRequest(model="fake", prompt="a", n=129), "INVALID_ARGUMENT", ["129", "128"]),
    ],
)
async def test_bad_requests_end_with_their_code_and_the_limit(
    stub: outrider_pb2_grpc.GenerationStub, request_: pb2.GenerateRequest, code: str, words: list[str]
) -> None:
    for call in (stub.Generate(request_), stub.GenerateStream(request_).read()):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code().name == code
        assert all(word in caught.value.details() for word in words), caught.value.details()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OverloadedError("full", retry_after_s=2), "RESOURCE_EXHAUSTED"),
        (EngineError("broke"), "INTERNAL"),
        (RuntimeError("secret"), "INTERNAL"),
    ],
)
async def test_failures_have_their_code(
    stub: outrider_pb2_grpc.GenerationStub, backend: FakeBackend, error: Exception, code: str
) -> None:
    backend.failures = [error]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(pb2.GenerateRequest(model="fake", prompt="a"))
    assert caught.value.code().name == code
    assert "secret" not in caught.value.details()


async def test_a_call_that_is_cancelled_stops_its_generation(
    stub: outrider_pb2_grpc.GenerationStub, backend: FakeBackend
) -> None:
    backend.step_s = 0.02
    call = stub.GenerateStream(pb2.GenerateRequest(model="fake", prompt="a", max_tokens=120))
    await call.read()
    assert backend.num_running == 1
    call.cancel()
    await backend.until_idle()


async def test_a_deadline_stops_the_generation(stub: outrider_pb2_grpc.GenerationStub, backend: FakeBackend) -> None:
    backend.step_s = 0.02
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(pb2.GenerateRequest(model="fake", prompt="a", max_tokens=120), timeout=0.2)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert backend.requests[0].timeout_s <= 0.25  # what gRPC reports as remaining may exceed the time-out by a little
    await backend.until_idle()


async def test_tokenize_and_get_model(stub: outrider_pb2_grpc.GenerationStub) -> None:
    tokens = await stub.Tokenize(pb2.TokenizeRequest(model="fake", prompt="abc"))
    assert (list(tokens.tokens), tokens.count, tokens.max_model_len) == (ids("abc"), 3, 128)
    assert await stub.Tokenize(pb2.TokenizeRequest(prompt="abc")) == tokens  # of the model that is served
    model = await stub.GetModel(pb2.GetModelRequest())
    assert (model.id, model.max_model_len, model.vocab_size) == ("fake", 128, 300)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.GetModel(pb2.GetModelRequest(model="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_follows_the_pairs(channel: grpc.aio.Channel, backend: FakeBackend) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for service in ("", SERVICE_NAME):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="other"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND

    async def describe() -> None:
        raise UnavailableError("no pair")

    backend.describe = describe
    answer = await stub.Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    watched = await stub.Watch(health_pb2.HealthCheckRequest()).read()
    assert watched.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_a_health_watch_ends_before_the_process_does(
    service: GenerationService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_api, "_HEALTH_PERIOD_S", 0.01)
    answers = iter([False, False, True])

    async def is_over() -> bool:
        return next(answers)

    watching = GrpcApi(service, ApiKeys(), lambda: is_over).Watch(health_pb2.HealthCheckRequest(), grpc_context=None)
    assert [answer.status async for answer in watching] == [health_pb2.HealthCheckResponse.SERVING]


async def test_the_health_of_all_is_listed(channel: grpc.aio.Channel) -> None:
    answer = await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
    serving = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
    assert dict(answer.statuses) == {"": serving, SERVICE_NAME: serving}


async def test_reflection_names_the_service(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    [answer] = [answer async for answer in stub.ServerReflectionInfo(iter([request]))]
    assert SERVICE_NAME in {service.name for service in answer.list_services_response.service}


async def test_calls_need_a_known_key_where_keys_are_set(service: GenerationService) -> None:
    async with grpc_channel(service, api_keys("sesame")) as channel:
        stub = outrider_pb2_grpc.GenerationStub(channel)
        for call in (stub.GetModel, stub.Generate, stub.Tokenize):
            request = {"GetModel": pb2.GetModelRequest(), "Tokenize": pb2.TokenizeRequest(model="fake", prompt="a")}
            message = request.get(
                call._method.decode().rpartition("/")[2], pb2.GenerateRequest(model="fake", prompt="a")
            )
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(message)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await stub.GetModel(pb2.GetModelRequest(), metadata=(("authorization", "Bearer sesame"),))


class ServeContext:
    """Ray Serve's context of a call: no abort, no deadline."""

    def __init__(self, peer: str = "ipv4:192.0.2.7:4000") -> None:
        self._peer = peer
        self.code = self.details = None
        self.trailing: tuple = ()

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return []

    def peer(self) -> str:
        return self._peer

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailing: tuple) -> None:
        self.trailing = trailing


async def test_under_serve_the_status_is_set_and_the_error_raised(
    service: GenerationService, backend: FakeBackend
) -> None:
    backend.failures = [OverloadedError("full", retry_after_s=2.0)]
    context = ServeContext()
    with pytest.raises(OverloadedError):
        await GrpcApi(service, ApiKeys()).Generate(pb2.GenerateRequest(model="fake", prompt="a"), context)
    assert (context.code, context.details) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
    assert context.trailing == (("retry-after", "2.0"),)


@pytest.mark.parametrize("peer", ["ipv4:127.0.0.1:4000", "ipv6:%5B::1%5D:4000", "ipv4:192.0.2.7:4000"])
async def test_behind_a_proxy_of_the_same_machine_other_machines_are_refused(
    service: GenerationService, monkeypatch: pytest.MonkeyPatch, peer: str
) -> None:
    monkeypatch.setenv(LOCAL_PROXY, "1")
    call = GrpcApi(service, ApiKeys()).GetModel(pb2.GetModelRequest(), ServeContext(peer))
    if not peer.startswith("ipv4:192"):
        assert (await call).id == "fake"
        return
    with pytest.raises(PermissionDeniedError, match="the call comes from ipv4:192"):
        await call


async def test_a_prediction_is_a_text(stub: outrider_pb2_grpc.GenerationStub, backend: FakeBackend) -> None:
    backend.next_token = say(*ids("abcdefgh"))
    answer = await stub.Generate(pb2.GenerateRequest(model="fake", prompt="x", max_tokens=6, prediction="abcdefgh"))
    assert backend.requests[0].prediction_token_ids == tuple(ids("abcdefgh"))
    assert answer.usage.accepted_prediction_tokens == 6
    assert answer.usage.rejected_prediction_tokens == 2


async def test_a_prediction_that_cannot_be_used_is_refused(stub: outrider_pb2_grpc.GenerationStub) -> None:
    request = pb2.GenerateRequest(
        model="fake", prompt="x", prediction="abcdefgh", speculation=pb2.Speculation(enabled=False)
    )
    with pytest.raises(grpc.aio.AioRpcError, match="prediction is a draft"):
        await stub.Generate(request)


async def test_a_message_is_read_up_to_8_mib(stub: outrider_pb2_grpc.GenerationStub) -> None:
    for num_mib, code in ((7, grpc.StatusCode.INVALID_ARGUMENT), (9, grpc.StatusCode.RESOURCE_EXHAUSTED)):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Generate(pb2.GenerateRequest(model="fake", prompt="a" * (num_mib << 20), max_tokens=1))
        assert error.value.code() == code
