"""Ray Serve's end of routing, with fakes for its replicas: ranks out, whatever comes in."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID, RequestMetadata
from ray.serve.request_router import PendingRequest

from protos.block_keys import PrefixHolder, block_keys, join_keys, root_key
from protos.errors import UnavailableError
from protos.messages import GenerateRequest
from router.routing.routed_call import RoutedCall, RouteQuery, RouteReply
from router.routing.serve_router import PrefillRouter, PrefixAwareRouter

PAIR = DeploymentID("Pair", "app")


@dataclass
class FakeReplica:
    """The part of a `RunningReplica` that Serve's router needs."""

    name: str
    max_ongoing_requests: int = 4
    num_ongoing: int = 0

    @property
    def replica_id(self) -> ReplicaID:
        return ReplicaID(self.name, PAIR)

    async def get_queue_len(self, *, deadline_s: float) -> int:
        return self.num_ongoing


@dataclass
class FakeIndex:
    """Chooses the workers in the order of `order`, or is gone."""

    order: tuple[str, ...] = ("b", "c", "a")
    holder: PrefixHolder | None = None
    is_gone: bool = False
    queries: list[RouteQuery] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    async def select(self, query: RouteQuery) -> RouteReply:
        self.queries.append(query)
        await asyncio.sleep(0.001)
        if self.is_gone:
            raise UnavailableError("gone")
        return RouteReply(0, 0, 0.0, 0.0, 0.0, self.order, "", 0, 0, self.holder)

    def withdraw(self, worker_id: str, request_id: str) -> None: ...

    def forget(self, worker_id: str) -> None:
        self.forgotten.append(worker_id)

    def warm_up(self) -> None: ...


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> FakeIndex:
    index = FakeIndex()
    for opener in ("IndexClient", "open_prefill_index"):
        monkeypatch.setattr(f"router.routing.serve_router.{opener}", lambda application, config: index)
    return index


@pytest.fixture
def replicas() -> list[FakeReplica]:
    return [FakeReplica(name) for name in "abc"]


@pytest.fixture
async def router(index: FakeIndex, replicas: list[FakeReplica]) -> PrefixAwareRouter:
    router = PrefixAwareRouter(
        deployment_id=PAIR, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
    )
    router.initialize_state(block_size=16)
    router.update_replicas(replicas)  # type: ignore[arg-type]
    await asyncio.sleep(0.01)  # it queries new replicas how busy they are, in the background
    return router


def pending(*args: Any, method: str = "generate", request_id: str = "i") -> PendingRequest:
    metadata = RequestMetadata(request_id="r", internal_request_id=request_id, call_method=method)
    return PendingRequest(args=list(args), kwargs={}, metadata=metadata)


def call(request_id: str = "r") -> RoutedCall:
    return RoutedCall(GenerateRequest(request_id, (1, 2)))


async def choose(router: PrefixAwareRouter, request: PendingRequest) -> str:
    async with asyncio.timeout(5):
        replica = await router._choose_replica_for_request(request)
    return replica.replica_id.unique_id


async def test_a_call_goes_where_the_index_says(router: PrefixAwareRouter, index: FakeIndex):
    assert await choose(router, pending(call())) == "b"
    assert set(index.queries[0].candidates) == {"a", "b", "c"}


async def test_a_full_pair_is_passed_over_for_the_next_best(
    router: PrefixAwareRouter, replicas: list[FakeReplica], index: FakeIndex
):
    replicas[1].num_ongoing = 4
    router.on_new_queue_len_info(replicas[1].replica_id, 4)
    request = pending(call())
    assert await choose(router, request) == "c"
    router.on_request_routed(request, replicas[2].replica_id, None)
    route = request.args[0].route
    assert route is not None
    assert route.failure == "diverted"


async def test_a_call_is_taken_once_a_pair_has_accepted_it(router: PrefixAwareRouter, replicas: list[FakeReplica]):
    request = pending(call())
    await choose(router, request)
    assert not request.args[0].is_taken
    router.on_request_routed(request, replicas[1].replica_id, None)
    assert request.args[0].is_taken


async def test_a_full_fleet_is_waited_for_without_a_busy_loop(
    router: PrefixAwareRouter, replicas: list[FakeReplica], index: FakeIndex
):
    for replica in replicas:
        replica.num_ongoing = 4
        router.on_new_queue_len_info(replica.replica_id, 4)
    task = asyncio.create_task(choose(router, pending(call())))
    await asyncio.sleep(0.3)
    assert not task.done()
    assert len(index.queries) < 15
    replicas[0].num_ongoing = 0
    assert await task == "a"


async def test_without_an_index_every_pair_is_used(router: PrefixAwareRouter, index: FakeIndex):
    index.is_gone = True
    chosen = {await choose(router, pending(call(str(n)), request_id=str(n))) for n in range(40)}
    assert chosen == {"a", "b", "c"}


async def test_calls_other_than_generate_do_not_query_the_index(router: PrefixAwareRouter, index: FakeIndex):
    chosen = {await choose(router, pending(method="describe", request_id=str(n))) for n in range(40)}
    assert chosen == {"a", "b", "c"}
    assert index.queries == []


async def test_calls_side_by_side_each_get_their_own_choice(router: PrefixAwareRouter, index: FakeIndex):
    requests = [pending(call(str(n)), request_id=str(n)) for n in range(4)]
    assert await asyncio.gather(*(choose(router, request) for request in requests)) == ["b"] * 4
    assert len(index.queries) == 4


async def test_a_replica_that_leaves_the_fleet_is_forgotten(
    router: PrefixAwareRouter, replicas: list[FakeReplica], index: FakeIndex
):
    router.update_replicas(replicas[:2])  # type: ignore[arg-type]
    assert index.forgotten == ["c"]
    router.on_replica_actor_died(replicas[0].replica_id)
    assert index.forgotten == ["c", "a"]


@dataclass(frozen=True, slots=True)
class FakeOrder:
    """The parts of `FetchOrder` and `KVLayout` that the router reads."""

    request_id: str = "p"
    token_ids: tuple[int, ...] = tuple(range(40))
    cache_salt: str = "tenant"


@dataclass(frozen=True, slots=True)
class FakeLayout:
    model_version: str = "m"
    block_size: int = 16


@pytest.fixture
async def prefill_router(index: FakeIndex, replicas: list[FakeReplica]) -> PrefillRouter:
    router = PrefillRouter(
        deployment_id=PAIR, handle_source=DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True
    )
    router.initialize_state(block_size=16)
    router.update_replicas(replicas)  # type: ignore[arg-type]
    await asyncio.sleep(0.01)
    return router


async def test_a_copy_is_asked_of_the_holder_and_of_any_other_where_that_is_gone(
    prefill_router: PrefillRouter, index: FakeIndex
):
    for holder_id, chosen in (("c", "c"), ("gone", "abc")):
        request = pending(FakeOrder(), FakeLayout(), method="copy")
        request.kwargs["holder_id"] = holder_id
        assert await choose(prefill_router, request) in chosen
    assert not index.queries


async def test_an_order_goes_to_the_prefill_replica_that_holds_its_blocks(
    prefill_router: PrefillRouter, index: FakeIndex, replicas: list[FakeReplica]
):
    router, index.holder = prefill_router, PrefixHolder("c", 2)
    request = pending(FakeOrder(), FakeLayout(), method="prefill")
    assert await choose(router, request) == "b"
    assert request.kwargs == {"holder": PrefixHolder("c", 2)}
    router.on_request_routed(request, replicas[1].replica_id, None)
    (query,) = index.queries
    assert query.num_tokens == 40
    assert query.keys == join_keys(block_keys(range(40), 16, root_key("m", "tenant")))
    assert await choose(router, pending(method="metrics_text")) in "abc"
    assert len(index.queries) == 1
