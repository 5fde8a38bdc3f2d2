"""Shell and target over a real socket, with an engine that counts: streams, refusals, aborts, death and return."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from actors.pair.target_client import TargetClient, TargetHead
from actors.pair.token_feed import TokenStream
from actors.process.frames import FrameListener
from actors.shell_messages import HeadAnswer, OrderHead, Refused
from actors.target.engine_loop import EngineLoop, StatusReporter
from actors.target.target_process import ShellServer
from engine.accounting.engine_stats import DraftStats, EngineStats
from engine.accounting.step_times import StepTimes
from protos.errors import EngineError, ModelChangedError, RequestError, UnavailableError
from protos.messages import FinishReason, GenerateRequest, SamplingParams, TokenChunk
from protos.served_model import ModelCard
from router.backend import migration
from router.backend.migration import MigratingStreams
from router.backend.token_feed import TokenListener as IngressFeed
from tests.actors.target_events import TargetEvents

CARD = ModelCard(vocab_size=16, max_model_len=64, eos_token_ids=(0,), model_version="v", block_size=4)
KEY = b"k" * 16
TIMEOUT_S = 20.0  # of these tests, on a busy machine


class CountingEngine:
    """Generates 0, 1, 2, ... for every request; prompt token 13 is refused, and 12 waits for `prepared`."""

    def __init__(self) -> None:
        self.requests: dict[str, GenerateRequest] = {}
        self.counts: dict[str, int] = {}
        self.step_s = 0.0
        self.may_step = threading.Event()
        self.may_step.set()
        self.prepared: Future[None] = Future()
        self.num_preparing = 0

    is_starved = False

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def prepare(self, request: GenerateRequest) -> Future[None] | None:
        if 12 not in request.prompt_token_ids:
            return None
        self.num_preparing += 1
        return self.prepared

    def add(self, request: GenerateRequest) -> None:
        if 13 in request.prompt_token_ids:
            raise RequestError("13 is not served; choose another", param="prompt")
        self.requests[request.request_id] = request
        self.counts[request.request_id] = len(request.output_token_ids)

    def abort(self, request_id: str) -> TokenChunk | None:
        self.requests.pop(request_id, None)
        return None

    def step(self) -> list[TokenChunk]:
        time.sleep(self.step_s)
        self.may_step.wait(TIMEOUT_S)
        return [self._advance(request) for request in list(self.requests.values())]

    def stats(self) -> EngineStats:
        return EngineStats(len(self.requests), 0, 0, 0, 8, len(self.requests), 0, 0, 0, DraftStats(), StepTimes())

    def close(self) -> None:
        self.requests.clear()

    def _advance(self, request: GenerateRequest) -> TokenChunk:
        token_id = self.counts[request.request_id]
        self.counts[request.request_id] += 1
        is_last = token_id + 1 == request.sampling.max_tokens
        if is_last:
            del self.requests[request.request_id]
        reason = FinishReason.LENGTH if is_last else None
        return TokenChunk(request.request_id, (token_id,), finish_reason=reason, offset=token_id)


class CacheOfOneBlock:
    """The part of a block manager that a reporter needs."""

    cached_keys = frozenset({KEY})

    def add_sink(self, sink: object) -> None: ...


class Target:
    """An engine loop on a socket, as a `TargetActor` runs it."""

    def __init__(self, path: Path) -> None:
        self.engine = CountingEngine()
        self.server = ShellServer(FrameListener(path), CARD, dict)
        reporter = StatusReporter(self.server.emit, CacheOfOneBlock())  # type: ignore[arg-type]
        self.loop = EngineLoop(self.engine, self.server.emit, reporter=reporter)
        self._threads = [
            threading.Thread(target=self.loop.run, daemon=True),
            threading.Thread(target=self.server.run, args=(self.loop,), daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def die(self) -> None:
        self.server.close()
        self.loop.close()
        for thread in self._threads:
            thread.join(TIMEOUT_S)


@contextmanager
def running_target(path: Path) -> Iterator[Target]:
    target = Target(path)
    try:
        yield target
    finally:
        target.die()


@pytest.fixture
def target(folder: Path) -> Iterator[Target]:
    with running_target(folder / "target.sock") as running:
        yield running


@pytest.fixture
async def client(folder: Path) -> AsyncIterator[TargetClient]:
    line = TargetClient(folder / "target.sock")
    yield line
    await line.close()


class ClientBackend:
    """A pair's `generate` without the pair: attempts that are given up stay in the engine until their drop arrives."""

    def __init__(self, client: TargetClient, sign_of_life_s: float | None = None) -> None:
        self.request_ids: list[str] = []
        self._client = client
        self._sign_of_life_s = sign_of_life_s

    async def generate(self, asked: GenerateRequest) -> AsyncGenerator[list[TokenChunk], None]:
        self.request_ids.append(asked.request_id)
        stream = self._client.add(asked)
        while True:
            yield await stream.next(self._sign_of_life_s)


def request(request_id: str = "a", prompt: tuple[int, ...] = (1,), max_tokens: int = 5) -> GenerateRequest:
    return GenerateRequest(request_id, prompt, SamplingParams(max_tokens=max_tokens))


async def collect(client: TargetClient, asked: GenerateRequest) -> list[int]:
    stream = client.add(asked)
    token_ids: list[int] = []
    while True:
        for chunk in await stream.next():
            token_ids += chunk.token_ids
            if chunk.finish_reason is not None:
                return token_ids


async def exhaust(stream: TokenStream) -> None:
    while True:
        await stream.next()


async def eventually(is_so: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not await is_so():  # noqa: ASYNC110  # the target has nothing to signal
            await asyncio.sleep(0.01)


async def until(is_so: Callable[[], bool]) -> None:
    async def look() -> bool:
        return is_so()

    await eventually(look)


async def test_tokens_of_a_step_leave_by_the_feed_and_the_stream_ends(target: Target, client: TargetClient) -> None:
    await client.wait_connected(TIMEOUT_S)
    expected = await collect(client, request("plain"))
    ingress = IngressFeed()
    inbox = ingress.open("fed")
    stream = client.add(request("fed"), await client.feeds.open(await ingress.address()))
    chunks: list[TokenChunk] = []
    async with asyncio.timeout(TIMEOUT_S):
        while not chunks or chunks[-1].finish_reason is None:
            chunks += await inbox.next()
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected
    assert await stream.next(TIMEOUT_S) == []
    assert stream.is_finished


async def test_the_target_greets_with_its_card(target, client):
    assert await client.wait_connected(TIMEOUT_S) == CARD


async def test_each_stream_gets_its_own_tokens_whole(target, client):
    await client.wait_connected(TIMEOUT_S)
    answers = await asyncio.gather(*(collect(client, request(str(n), max_tokens=n)) for n in range(1, 9)))
    assert answers == [list(range(n)) for n in range(1, 9)]
    assert client.num_requests == 0


async def test_a_slow_reader_gets_all_that_queued_up_at_once(target, client):
    await client.wait_connected(TIMEOUT_S)
    stream = client.add(request(max_tokens=20))
    await until(lambda: len(stream._chunks) == 20)
    assert len(await stream.next()) == 20


async def test_a_refusal_fails_its_stream_and_no_other(target, client):
    await client.wait_connected(TIMEOUT_S)
    good, bad = await asyncio.gather(
        collect(client, request("good")), collect(client, request("bad", (13,))), return_exceptions=True
    )
    assert good == [0, 1, 2, 3, 4]
    assert isinstance(bad, RequestError)
    assert bad.param == "prompt"


async def test_a_dropped_request_is_aborted_in_the_engine(target, client):
    await client.wait_connected(TIMEOUT_S)
    target.engine.step_s = 0.005
    stream = client.add(request(max_tokens=10_000))
    await stream.next()
    client.drop("a")
    client.drop("unknown")

    async def is_free() -> bool:
        return (await client.ping()).engine.num_used_blocks == 0

    await eventually(is_free)


async def test_a_pair_asked_again_during_a_long_step_delivers_each_token_once(target, client, monkeypatch):
    await client.wait_connected(TIMEOUT_S)
    target.engine.step_s = 0.2
    backend = ClientBackend(client)
    monkeypatch.setattr(migration, "SILENCE_S", 0.1)
    monkeypatch.setattr(migration, "FIRST_TOKEN_S", 1.0)
    migrating = MigratingStreams(backend.generate)
    stream = migrating.generate(request(max_tokens=4))
    tokens = []
    async for batch in stream:
        tokens += [token_id for chunk in batch for token_id in chunk.token_ids]
        target.engine.step_s = 0.2 if len(backend.request_ids) < 3 else 0.0
    assert tokens == [0, 1, 2, 3]
    assert backend.request_ids[:3] == ["a", "a.1", "a.2"]


async def test_signs_of_life_keep_a_stream_with_its_pair_through_a_long_step(target, client, monkeypatch):
    await client.wait_connected(TIMEOUT_S)
    target.engine.step_s = 0.3
    backend = ClientBackend(client, sign_of_life_s=0.02)
    monkeypatch.setattr(migration, "SILENCE_S", 0.15)
    migrating = MigratingStreams(backend.generate)
    chunks = [chunk async for batch in migrating.generate(request(max_tokens=3)) for chunk in batch]
    assert [chunk.token_ids for chunk in chunks] == [(0,), (1,), (2,)]
    assert backend.request_ids == ["a"]


async def test_a_request_made_for_another_model_is_refused(target, client):
    await client.wait_connected(TIMEOUT_S)
    with pytest.raises(ModelChangedError, match="serves v"):
        client.add(replace(request(), model_version="older"))
    assert await collect(client, replace(request(), model_version="v")) == [0, 1, 2, 3, 4]


async def test_an_id_in_use_is_refused(target, client):
    await client.wait_connected(TIMEOUT_S)
    target.engine.step_s = 0.005
    client.add(request(max_tokens=1000))
    with pytest.raises(RequestError, match="in use"):
        client.add(request())


async def test_a_ping_during_a_step_is_answered_with_the_steps_age(target, client):
    await client.wait_connected(TIMEOUT_S)
    target.engine.may_step.clear()
    client.add(request())
    await until(lambda: target.loop.stalled_s > 0.05)
    pong = await client.ping()
    assert 0.05 < pong.stalled_s <= target.loop.stalled_s
    target.engine.may_step.set()


async def test_a_request_that_is_prepared_holds_up_no_other_and_no_ping(target, client):
    await client.wait_connected(TIMEOUT_S)
    slow = asyncio.create_task(collect(client, request("slow", (12,))))
    await until(lambda: target.engine.num_preparing == 1)
    assert await collect(client, request("quick")) == [0, 1, 2, 3, 4]
    await client.ping()
    assert not slow.done()
    target.engine.prepared.set_result(None)
    assert await slow == [0, 1, 2, 3, 4]


async def test_a_request_dropped_while_it_is_prepared_never_runs(target, client):
    await client.wait_connected(TIMEOUT_S)
    client.add(request("slow", (12,)))
    await until(lambda: target.engine.num_preparing == 1)
    client.drop("slow")
    assert await collect(client, request("behind")) == [0, 1, 2, 3, 4]
    target.engine.prepared.set_result(None)
    assert await collect(client, request("after")) == [0, 1, 2, 3, 4]
    assert "slow" not in target.engine.counts


async def test_death_fails_streams_at_once_and_fences_until_the_target_is_back(folder, client):
    with running_target(folder / "target.sock") as target:
        await client.wait_connected(TIMEOUT_S)
        target.engine.step_s = 0.01
        stream = client.add(request(max_tokens=10_000))
        await stream.next()
    with pytest.raises(UnavailableError, match="was lost"):
        await exhaust(stream)
    with pytest.raises(UnavailableError, match="restarting"):
        client.add(request())
    with running_target(folder / "target.sock"):
        await client.wait_connected(TIMEOUT_S)
        assert await collect(client, request()) == [0, 1, 2, 3, 4]


async def test_a_fenced_target_loses_its_streams(target, client):
    await client.wait_connected(TIMEOUT_S)
    target.engine.step_s = 0.01
    stream = client.add(request(max_tokens=10_000))
    client.fence()
    with pytest.raises(UnavailableError):
        await exhaust(stream)


async def test_requests_of_a_shell_that_leaves_are_aborted(folder, target):
    client = TargetClient(folder / "target.sock")
    await client.wait_connected(TIMEOUT_S)
    target.engine.step_s = 0.005
    client.add(request(max_tokens=10_000))
    await until(lambda: bool(target.engine.requests))
    await client.close()

    async def is_idle() -> bool:
        return not target.engine.requests

    await eventually(is_idle)


async def test_unknown_error_kinds_become_engine_errors():
    assert type(Refused("a", "NoSuchError", "x").error()) is EngineError


async def test_a_listener_gets_load_and_cache_and_every_start_and_loss_of_the_target(folder: Path) -> None:
    path, events = folder / "target.sock", TargetEvents()
    client = TargetClient(path, events)
    client.ask_snapshot()  # without a target nothing happens
    with running_target(path) as target:
        target.engine.step_s = 0.02
        await client.wait_connected(TIMEOUT_S)
        await collect(client, request(max_tokens=3))
        client.ask_snapshot()
        await until(lambda: events.snapshots == [KEY] and events.numbers_running[-1:] == [0])
        assert 1 in events.numbers_running
    await until(lambda: events.changes == ["ready", "lost"])
    with running_target(path):
        await client.wait_connected(TIMEOUT_S)
    await client.close()
    assert events.changes[:3] == ["ready", "lost", "ready"]


async def test_a_refused_order_ends_no_request_whatever_its_name(client: TargetClient, target: Target) -> None:
    class Heads:
        running = None

        def carry_out(self, order: OrderHead) -> None:
            refused = Refused.of(str(order.order_id), RequestError("no such head"))
            target.server.emit(HeadAnswer(order.order_id, refusal=refused))

    target.server.heads = Heads()  # type: ignore[assignment]
    await client.wait_connected(TIMEOUT_S)
    target.engine.may_step.clear()
    names = ("1", "head-order-1")
    streams = [asyncio.create_task(collect(client, request(name))) for name in names]
    await asyncio.sleep(0)
    with pytest.raises(RequestError, match="no such head"):
        await TargetHead(client).check_draft("/head")
    target.engine.may_step.set()
    assert await asyncio.gather(*streams) == [[0, 1, 2, 3, 4]] * 2
