"""Chunks and errors that come through a Serve handle (Serve's local testing mode, no cluster)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import pytest
from prometheus_client import CollectorRegistry
from ray import serve
from ray.exceptions import ActorDiedError
from ray.serve.exceptions import BackPressureError

from actors.pair.token_feed import TokenFeeds, TokenStream
from protos.errors import EngineError, OverloadedError, RequestError, ServingError, ShuttingDownError, UnavailableError
from protos.messages import FinishReason, GenerateRequest, TokenChunk
from protos.served_model import ModelCard
from router.backend import serve_backend
from router.backend.serve_backend import ServeBackend, up_text
from router.routing.request_routing import RequestRouting, RouterMetrics
from router.routing.routed_call import RoutedCall
from tests.router.fixtures.fake_backend import CARD

ERRORS: dict[int, BaseException] = {
    1: RequestError("wrong", param="prompt"),
    2: BackPressureError(5, 5, 429, 7.0),
    3: ActorDiedError(),
    4: RuntimeError("a bug"),
    5: UnavailableError("restarting", retry_after_s=1.0),
}


SAYS_NOTHING, COMES_LATE, BY_THE_FEED, CUT_SHORT = 6, 7, 8, 9


async def yes() -> bool:
    return True


async def no() -> bool:
    return False


@serve.deployment(name="Pair")
class ScriptedPair:
    """The first prompt token selects the outcome."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[list[TokenChunk] | TokenChunk, None]:
        if request.prompt_token_ids[0] == SAYS_NOTHING:
            return
        if request.prompt_token_ids[0] == COMES_LATE:
            await asyncio.sleep(0.2)
        if request.prompt_token_ids[0] in (BY_THE_FEED, CUT_SHORT):
            feeds, stream = TokenFeeds(), TokenStream()
            feed = await feeds.open(request.feed_address)
            assert feed is not None
            feed.attach(stream)
            stream.push(TokenChunk(request.request_id, (7,)))
            if request.prompt_token_ids[0] == BY_THE_FEED:
                stream.push(TokenChunk(request.request_id, (8,), (), FinishReason.LENGTH))
            feeds.flush()
            return
        yield []  # a sign of life
        yield TokenChunk(request.request_id, (7,))
        if request.prompt_token_ids[0] in ERRORS:
            raise ERRORS[request.prompt_token_ids[0]]
        yield [TokenChunk(request.request_id, (8,)), TokenChunk(request.request_id, (9,), (), FinishReason.LENGTH)]

    async def describe(self) -> ModelCard:
        return CARD

    async def metrics_text(self) -> str:
        return "outrider_x 1\n"


class AbsentDeployment:
    def broadcast(self, method_name: str) -> None:
        raise UnavailableError("no replica")


class AlwaysTaken(RequestRouting):
    """Mark every call as taken by a pair: there is no router of ours here."""

    def open(self, request: GenerateRequest) -> RoutedCall:
        call = super().open(request)
        call.is_taken = True
        return call


def open_backend(
    is_deleted: Callable[[], Awaitable[bool]] = no,
    prefill: AbsentDeployment | None = None,
    routing: type[RequestRouting] = RequestRouting,
) -> ServeBackend:
    handle = serve.run(ScriptedPair.bind(), _local_testing_mode=True)
    return ServeBackend(handle, routing(RouterMetrics(CollectorRegistry())), is_deleted, prefill or handle)


@pytest.fixture
def backend() -> ServeBackend:
    return open_backend()


async def tokens_of(backend: ServeBackend, request: GenerateRequest) -> list[int]:
    batches = [batch async for batch in backend.generate(request)]
    return [token for batch in batches for chunk in batch for token in chunk.token_ids]


async def test_chunks_come_in_order(backend: ServeBackend) -> None:
    assert await tokens_of(backend, GenerateRequest("r", (0,))) == [7, 8, 9]


async def test_tokens_by_the_feed_are_waited_for_when_serves_stream_has_ended(backend: ServeBackend) -> None:
    assert await tokens_of(backend, GenerateRequest("r", (BY_THE_FEED,))) == [7, 8]
    with pytest.raises(UnavailableError, match="ended its stream before"):
        await tokens_of(backend, GenerateRequest("r", (CUT_SHORT,)))


async def test_a_stream_may_be_left(backend: ServeBackend) -> None:
    async with aclosing(backend.generate(GenerateRequest("r", (0,)))) as stream:
        await anext(stream)


@pytest.mark.parametrize(
    ("script", "kind", "retry_after_s"),
    [
        (1, RequestError, None),
        (2, OverloadedError, 7.0),
        (3, UnavailableError, 2.0),
        (4, EngineError, None),
        (5, UnavailableError, 1.0),
        (SAYS_NOTHING, UnavailableError, 2.0),
    ],
)
async def test_errors_are_ours(
    backend: ServeBackend, script: int, kind: type[ServingError], retry_after_s: float | None
) -> None:
    with pytest.raises(kind) as caught:
        async for _ in backend.generate(GenerateRequest("r", (script,))):
            pass
    assert type(caught.value) is kind
    assert caught.value.retry_after_s == retry_after_s


async def test_a_request_waits_while_a_pair_may_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_backend, "_TAKEN_TIMEOUT_S", 0.02)
    late = GenerateRequest("r", (COMES_LATE,))
    assert await tokens_of(open_backend(no), late) == [7, 8, 9]
    with pytest.raises(ShuttingDownError):
        await anext(open_backend(yes).generate(late))


async def test_a_request_that_a_pair_has_taken_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_backend, "_TAKEN_TIMEOUT_S", 0.02)
    late = GenerateRequest("r", (COMES_LATE,))
    assert await tokens_of(open_backend(yes, routing=AlwaysTaken), late) == [7, 8, 9]


async def test_the_model_card_is_asked_for(backend: ServeBackend) -> None:
    assert await backend.describe() == CARD


async def test_prefill_replicas_show_their_metrics_and_may_be_absent(backend: ServeBackend) -> None:
    text = "outrider_x 1\n" + up_text("replica", "unknown-0", True)
    assert await backend.metrics_texts() == [text] * 2
    assert await open_backend(prefill=AbsentDeployment()).metrics_texts() == [text]
