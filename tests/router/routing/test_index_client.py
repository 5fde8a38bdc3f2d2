"""The line to the index: deadlines, pauses after failures, and a new actor after a death."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from ray.exceptions import ActorDiedError

from protos.errors import UnavailableError
from router.config import RouterConfig
from router.routing.index import IndexClient, IndexTimeoutError
from router.routing.routed_call import RouteQuery, RouteReply

QUERY = RouteQuery("r", 16, b"", "", ("a",))


class Remote:
    """An actor method with a reply and a delay."""

    def __init__(self) -> None:
        self.reply: Any = "reply"
        self.delay_s = 0.0
        self.num_calls = 0

    def remote(self, *_: object) -> Awaitable[Any]:
        self.num_calls += 1
        return self._reply()

    async def _reply(self) -> Any:
        await asyncio.sleep(self.delay_s)
        if isinstance(self.reply, Exception):
            raise self.reply
        return self.reply


class Withdrawals:
    def __init__(self) -> None:
        self.given: list[tuple[str, str]] = []

    def remote(self, worker_id: str, request_id: str) -> None:
        self.given.append((worker_id, request_id))


class FakeActor:
    def __init__(self) -> None:
        self.select = Remote()
        self.report = Remote()
        self.withdraw = Withdrawals()


class Cluster:
    """Hands out actors and a clock."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self.now_s = 0.0
        self.actors: list[FakeActor] = []
        self.client = IndexClient(
            "app", RouterConfig(16, index_timeout_s=timeout_s), lambda name, config: self.start(), lambda: self.now_s
        )

    async def impatient(self, timeout_s: float) -> None:
        """Connect, and then wait for answers no longer than `timeout_s`."""
        await self.client.select(QUERY)
        self.client._config = RouterConfig(16, index_timeout_s=timeout_s)

    def start(self) -> FakeActor:
        self.actors.append(FakeActor())
        return self.actors[-1]


async def test_a_reply_in_time_is_returned():
    cluster = Cluster()
    assert await cluster.client.select(QUERY) == "reply"
    assert await cluster.client.select(QUERY) == "reply"
    assert len(cluster.actors) == 1


async def test_a_query_ends_at_its_deadline_and_none_is_sent_during_the_pause():
    cluster = Cluster()
    await cluster.impatient(0.3)
    select = cluster.actors[0].select
    select.delay_s = 60.0
    async with asyncio.timeout(20.0):
        with pytest.raises(IndexTimeoutError):
            await cluster.client.select(QUERY)
        with pytest.raises(UnavailableError):
            await cluster.client.select(QUERY)
    assert select.num_calls == 2  # the third was not even sent
    select.delay_s = 0.0
    cluster.now_s += 0.11
    assert await cluster.client.select(QUERY) == "reply"


async def test_a_late_reply_ends_the_pause_and_its_reservation():
    cluster = Cluster()
    await cluster.impatient(0.3)
    actor = cluster.actors[0]
    actor.select.delay_s = 0.5
    actor.select.reply = RouteReply(0, 0, 0.0, 0.0, 0.0, ("b", "a"), "", 0, 0)
    with pytest.raises(IndexTimeoutError):
        await cluster.client.select(QUERY)
    actor.select.delay_s = 0.0
    await asyncio.sleep(0.5)
    assert actor.withdraw.given == [("b", "r")]
    await cluster.client.select(QUERY)  # though no time has passed on its clock


async def test_queries_that_fail_together_make_one_pause():
    cluster = Cluster()
    await cluster.client.select(QUERY)
    cluster.actors[0].select.reply = ValueError("broken")
    await asyncio.gather(*(cluster.client.select(QUERY) for _ in range(10)), return_exceptions=True)
    cluster.actors[0].select.reply = "reply"
    cluster.now_s += 0.11
    assert await cluster.client.select(QUERY) == "reply"


async def test_the_pause_doubles_with_each_failure_up_to_two_seconds():
    cluster = Cluster()
    await cluster.client.select(QUERY)
    cluster.actors[0].select.reply = ValueError("broken")
    pauses = []
    for _ in range(7):
        with pytest.raises(UnavailableError):
            await cluster.client.select(QUERY)
        start_s, num_calls = cluster.now_s, cluster.actors[0].select.num_calls
        while cluster.actors[0].select.num_calls == num_calls:
            cluster.now_s += 0.01
            with pytest.raises(UnavailableError):
                await cluster.client.select(QUERY)
        pauses.append(cluster.now_s - start_s)
    assert pauses[0] < pauses[1] < pauses[2] < 2.1
    assert pauses[-1] == pytest.approx(2.0, abs=0.1)


async def test_a_dead_actor_is_looked_up_anew():
    cluster = Cluster()
    await cluster.client.select(QUERY)
    cluster.actors[0].select.reply = ActorDiedError()
    with pytest.raises(UnavailableError):
        await cluster.client.select(QUERY)
    cluster.now_s += 1.0
    assert await cluster.client.select(QUERY) == "reply"
    assert len(cluster.actors) == 2


async def test_a_slow_start_is_waited_for_no_longer_than_an_answer_and_is_not_begun_twice():
    cluster = Cluster(0.3)
    release = asyncio.Event()

    async def slow() -> FakeActor:
        await release.wait()
        return cluster.start()

    cluster.client._find = slow  # type: ignore[method-assign]
    with pytest.raises(IndexTimeoutError):
        await cluster.client.select(QUERY)
    release.set()
    await asyncio.sleep(0)
    cluster.now_s += 1.0
    assert await cluster.client.select(QUERY) == "reply"
    assert len(cluster.actors) == 1


def test_another_configuration_is_another_index():
    names = {IndexClient("app", RouterConfig(16, policy))._name for policy in ("prefix", "load", "prefix")}
    assert len(names) == 2


async def test_withdraw_and_forget_without_an_index_do_nothing():
    Cluster().client.withdraw("a", "r")
    Cluster().client.forget("a")
