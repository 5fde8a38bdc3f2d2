"""However a request ends, all that it took is free again: places in pairs, reservations, bytes, streams."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from actors.pair.pair_metrics import PairMetrics
from actors.pair.pair_shell import PairShell
from actors.pair.token_feed import TokenStream
from actors.settings import PairSettings
from engine.config import EngineConfig, ModelConfig
from protos.errors import EngineLostError, GrammarError, ModelChangedError, RequestError, UnavailableError
from protos.messages import FinishReason, GenerateRequest, TokenChunk
from protos.served_model import ModelCard
from router.api_keys import ApiKeys
from router.backend.serve_backend import ServeBackend
from router.config import IngressConfig, IngressLimits
from router.generation.generation_service import GenerationService
from router.metrics.ingress_metrics import IngressMetrics
from router.routing.request_routing import RequestRouting, RouterMetrics
from router.routing.routed_call import RoutedCall, RouteQuery, RouteReply
from router.routing.serve_router import RouteChooser
from router.tokenizer import Tokenizer
from router.tokenizer.tokenizer_files import TokenizerFiles
from tests.cluster.local.fake_server import serving
from tests.router.fixtures.fake_backend import CARD

NUM_PLACES = 4
LIMITS = IngressLimits(max_body_bytes=20_000)


@dataclass
class FailingService:
    """Two pairs and an index. The requests' ids: `reserved` by the index, and `answered` by a pair."""

    failures: list[Exception] = field(default_factory=list)  # of the next requests, instead of tokens
    refusals: list[Exception] = field(default_factory=list)  # of the next requests, when they are sent to the engine
    end: FinishReason = FinishReason.LENGTH
    may_choose: asyncio.Event = field(default_factory=asyncio.Event)
    may_answer: asyncio.Event = field(default_factory=asyncio.Event)
    reserved: set[tuple[str, str]] = field(default_factory=set)
    answered: set[str] = field(default_factory=set)
    running: set[str] = field(default_factory=set)
    is_left: asyncio.Event = field(default_factory=asyncio.Event)  # a call was cancelled
    num_asked: int = 0
    num_chosen: int = 0

    def __post_init__(self) -> None:
        self.may_choose.set()
        self.may_answer.set()
        self.pairs = {name: FailingPair(self) for name in "ab"}

    async def select(self, query: RouteQuery) -> RouteReply:
        self.num_asked += 1
        await self.may_choose.wait()
        self.num_chosen += 1
        names = sorted(query.candidates, reverse=query.refused_by == "a")
        self.reserved.discard((str(query.refused_by), query.request_id))
        self.reserved.add((names[0], query.request_id))
        return RouteReply(0, 0, 0.0, 0.0, 0.0, tuple(names), "", 0, 0, None)

    def withdraw(self, worker_id: str, request_id: str) -> None:
        self.reserved.discard((worker_id, request_id))

    @property
    def is_at_rest(self) -> bool:
        """True if nothing runs and every reservation was answered: a pair's next report ends that."""
        is_reserved = {request_id for _, request_id in self.reserved} - self.answered
        is_chosen = self.num_chosen == self.num_asked
        return is_chosen and not self.running and not is_reserved and all(pair.is_empty for pair in self.pairs.values())


class FailingEngine:
    """The part of a `TargetClient` that a shell needs: tokens, or the next failure."""

    def __init__(self, world: FailingService) -> None:
        self.feeds = self
        self._world = world
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def open(self, address: str) -> None:
        """There is no feed."""

    def add(self, request: GenerateRequest, feed: None) -> TokenStream:
        if self._world.refusals:
            raise self._world.refusals.pop(0)
        stream = TokenStream()
        self._world.running.add(request.request_id)
        self._tasks[request.request_id] = asyncio.create_task(self._answer(request, stream))
        return stream

    async def _answer(self, request: GenerateRequest, stream: TokenStream) -> None:
        world = self._world
        await world.may_answer.wait()
        if world.failures:
            stream.fail(world.failures.pop(0))
            return
        world.answered.add(request.request_id)
        for offset in range(len(request.output_token_ids), request.sampling.max_tokens):
            is_last = offset + 1 == request.sampling.max_tokens or world.end is not FinishReason.LENGTH
            reason = world.end if is_last else None
            stream.push(TokenChunk(request.request_id, (5,), finish_reason=reason, offset=offset))
            await asyncio.sleep(0.001)
            if is_last:
                return

    def drop(self, request_id: str) -> None:
        self._tasks.pop(request_id).cancel()
        self._world.running.discard(request_id)


class FailingPair(PairShell):
    def __init__(self, world: FailingService) -> None:
        settings = PairSettings(EngineConfig(ModelConfig("nowhere")), max_requests=NUM_PLACES)
        super().__init__(settings, PairMetrics())
        self._client = FailingEngine(world)  # type: ignore[assignment]

    @property
    def is_empty(self) -> bool:
        """True if a request is let in that is larger than the pair: it needs an empty one."""
        probe = GenerateRequest("probe", (1,), num_places=NUM_PLACES + 1)
        try:
            self._admission.enter(probe)
        except Exception:
            return False
        self._admission.leave(probe, 1.0)
        return True


class Handle:
    """Serve's handle of the pairs. As in Serve, a choice that has begun goes on when its caller has left."""

    def __init__(self, world: FailingService, name: str = "") -> None:
        self._world = world
        self._name = name
        self._chooser = RouteChooser(world)
        self._choices: set[asyncio.Future[Any]] = set()

    def options(self, method_name: str, **_: Any) -> Handle:
        return Handle(self._world, method_name)

    def remote(self, *args: Any) -> Any:
        return _card() if self._name == "describe" else FakeResponse(self._run(*args), self._world.is_left)

    async def _run(self, call: RoutedCall) -> AsyncIterator[list[TokenChunk]]:
        choice = asyncio.ensure_future(self._chooser.choose(call, list(self._world.pairs)))
        self._choices.add(choice)
        ((chosen, *_), *_) = await asyncio.shield(choice)
        self._chooser.routed(call, chosen)
        async for batch in self._world.pairs[chosen].generate(call.request):
            yield batch


async def _card() -> ModelCard:
    return CARD


class FakeResponse:
    """A response of Serve's: its replica works by itself until it is cancelled."""

    def __init__(self, items: AsyncIterator[list[TokenChunk]], is_left: asyncio.Event) -> None:
        self._is_left = is_left
        self._queue: asyncio.Queue[list[TokenChunk] | BaseException] = asyncio.Queue()
        self._task = asyncio.create_task(self._work(items))

    def cancel(self) -> None:
        self._task.cancel()
        self._is_left.set()

    async def _work(self, items: Any) -> None:
        try:
            async for item in items:
                self._queue.put_nowait(item)
            self._queue.put_nowait(StopAsyncIteration())
        except Exception as error:
            self._queue.put_nowait(error)
        finally:
            await items.aclose()

    def __aiter__(self) -> FakeResponse:
        return self

    async def __anext__(self) -> list[TokenChunk]:
        item = await self._queue.get()
        if isinstance(item, BaseException):
            raise item
        return item


Way = Callable[[httpx.AsyncClient, FailingService], Awaitable[int]]
BODY: dict[str, Any] = {"model": "fake", "prompt": [5, 6, 7], "max_tokens": 4}


async def post(http: httpx.AsyncClient, **fields: Any) -> int:
    return (await http.post("/v1/completions", json={**BODY, **fields})).status_code


def posting(
    *,
    failures: tuple[Exception, ...] = (),
    refusals: tuple[Exception, ...] = (),
    end: FinishReason = FinishReason.LENGTH,
    **fields: Any,
) -> Way:
    async def way(http: httpx.AsyncClient, world: FailingService) -> int:
        world.failures, world.refusals, world.end = list(failures), list(refusals), end
        return await post(http, **fields)

    return way


def sending(content: bytes, headers: Mapping[str, str] = MappingProxyType({})) -> Way:
    async def way(http: httpx.AsyncClient, world: FailingService) -> int:
        names = {"content-type": "application/json", **headers}
        return (await http.post("/v1/completions", content=content, headers=names)).status_code

    return way


def leaving(stage: str, **fields: Any) -> Way:
    """Leave while the index chooses, before the first token, or after it."""

    async def way(http: httpx.AsyncClient, world: FailingService) -> int:
        held = {"choice": world.may_choose, "token": world.may_answer}.get(stage)
        if held is not None:
            held.clear()
        asking = asyncio.create_task(post(http, **fields))
        stages = {"choice": lambda: world.num_asked, "token": lambda: world.running, "rest": lambda: world.answered}
        async with asyncio.timeout(20):
            while not stages[stage]():  # noqa: ASYNC110  # there is nothing to await
                await asyncio.sleep(0.01)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        async with asyncio.timeout(20):
            await world.is_left.wait()
        world.may_choose.set()
        return 0

    return way


async def cut_body(http: httpx.AsyncClient, world: FailingService) -> int:
    _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(head + b'Content-Length: 900\r\n\r\n{"prompt": "')
    await asyncio.sleep(0.1)
    writer.transport.abort()
    return 0


async def full(http: httpx.AsyncClient, world: FailingService) -> int:
    """Both pairs are full; then their requests end."""
    others = [GenerateRequest(str(rank), (1,)) for rank in range(NUM_PLACES)]
    for pair in world.pairs.values():
        for each in others:
            pair._admission.enter(each)
    status = await post(http, n=2)
    for pair in world.pairs.values():
        for each in others:
            pair._admission.leave(each, 1.0)
    return status


LOST, AWAY = EngineLostError("lost"), UnavailableError("away")
CUT_GZIP = gzip.compress(json.dumps(BODY).encode())[:30]
WAYS: dict[str, tuple[Way, int]] = {
    "answered": (posting(), 200),
    "answered, three choices, streamed": (posting(n=3, stream=True), 200),
    "a wrong value": (posting(temperature=-1), 400),
    "a value that the engine refuses": (posting(prompt=[5000]), 400),
    "another model": (posting(model="other"), 404),
    "too many choices": (posting(n=129), 400),
    "no JSON": (sending(b"{"), 400),
    "a compressed body that breaks off": (sending(CUT_GZIP, {"content-encoding": "gzip"}), 400),
    "a body that is too long": (sending(b" " * 30_000), 413),
    "a body that is cut": (cut_body, 0),
    "the engine refuses it": (posting(failures=(RequestError("no"),)), 400),
    "the engine refuses one of three": (posting(n=3, failures=(GrammarError("no"),)), 400),
    "the pairs are full": (full, 503),
    "the pair cannot take one of three": (posting(n=3, refusals=(ModelChangedError("other"),)), 503),
    "its deadline": (posting(end=FinishReason.TIMEOUT), 504),
    "no numbers": (posting(end=FinishReason.NON_FINITE), 500),
    "three engines end": (posting(failures=(LOST, LOST, LOST)), 500),
    "it moves to another pair": (posting(failures=(AWAY,)), 200),
    "given up while it moves": (posting(end=FinishReason.ABORT, timeout_s=1.0), 504),
    "left while the index chooses": (leaving("choice"), 0),
    "left before the first token": (leaving("token"), 0),
    "left before the first token of three": (leaving("token", n=3), 0),
    "left in the middle": (leaving("rest", max_tokens=100, stream=True), 0),
    "left in the middle of three": (leaving("rest", max_tokens=100, n=3), 0),
}


@pytest.mark.parametrize("name", WAYS)
async def test_what_a_request_took_is_free_whatever_ends_it(tokenizer: Tokenizer, name: str) -> None:
    world, metrics = FailingService(), IngressMetrics()
    backend = ServeBackend(Handle(world), RequestRouting(RouterMetrics(CollectorRegistry())), _no)  # type: ignore[arg-type]
    config = IngressConfig(model_id="fake", model_path="nowhere", limits=LIMITS)
    service = GenerationService(backend, TokenizerFiles(tokenizer, None), config, metrics)
    way, wanted = WAYS[name]
    async with (
        serving(keys=ApiKeys(), service=service) as port,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as http,
    ):
        assert await way(http, world) == wanted
        for _ in range(60):
            is_free = world.is_at_rest and "outrider_http_body_bytes 0.0" in metrics.text()
            if is_free:
                break
            await asyncio.sleep(0.05)
        assert is_free


async def _no() -> bool:
    return False
