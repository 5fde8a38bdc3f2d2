"""A dead or stuck target is restarted, and one that stays away makes the replica unhealthy."""

import asyncio
from typing import cast

import pytest

from actors.pair.pair_shell import Watchdog, check_running
from actors.pair.target_client import TargetClient
from actors.shell_messages import DraftChannelStats, Pong
from engine.accounting.engine_stats import DraftStats, EngineStats
from engine.accounting.step_times import StepTimes
from protos.errors import UnavailableError

STATS = EngineStats(0, 0, 0, 0, 8, 0, 0, 0, 0, DraftStats(), StepTimes())


class ScriptedClient:
    """Answers pings by a script."""

    def __init__(self) -> None:
        self.is_connected = True
        self.answer: Pong | Exception = Pong(0.0, STATS, {})
        self.num_fences = 0

    async def ping(self) -> Pong:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def fence(self) -> None:
        self.num_fences += 1


class Rig:
    """A watchdog with a scripted client and a clock that is set by hand."""

    def __init__(self) -> None:
        self.client = ScriptedClient()
        self.now_s = 1000.0
        self.num_restarts = 0
        self.restarted_drafts: list[str] = []
        self.pongs: list[Pong] = []
        self.watchdog = Watchdog(
            cast(TargetClient, self.client),
            self._restart,
            self.pongs.append,
            self.restarted_drafts.append,
            clock=lambda: self.now_s,
        )

    def _restart(self) -> None:
        self.num_restarts += 1

    async def look(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """One round of `run`."""
        rounds = 0

        async def sleep(seconds: float) -> None:
            nonlocal rounds
            rounds += 1
            if rounds > 1:
                raise asyncio.CancelledError

        monkeypatch.setattr("actors.pair.pair_shell.asyncio.sleep", sleep)
        with pytest.raises(asyncio.CancelledError):
            await self.watchdog.run()


@pytest.fixture
def rig() -> Rig:
    return Rig()


async def test_a_healthy_target_is_left_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    await rig.look(monkeypatch)
    assert (rig.num_restarts, len(rig.pongs)) == (0, 1)
    rig.watchdog.check()


async def test_a_target_that_does_not_answer_is_fenced_and_restarted(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    rig.client.answer = TimeoutError()
    await rig.look(monkeypatch)
    assert (rig.client.num_fences, rig.num_restarts) == (1, 1)


async def test_a_target_stuck_in_a_step_is_fenced_and_restarted(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    rig.client.answer = Pong(121.0, STATS, {})
    await rig.look(monkeypatch)
    assert (rig.client.num_fences, rig.num_restarts) == (1, 1)


async def test_a_draft_that_is_silent_for_long_is_restarted_once_in_a_while(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    restarts = []
    for silent_s, passed_s in ((299.0, 400.0), (301.0, 0.0), (320.0, 20.0), (700.0, 400.0)):
        rig.now_s += passed_s
        rig.client.answer = Pong(
            0.0, STATS, {"model": DraftChannelStats(silent_s=silent_s), "prose": DraftChannelStats()}
        )
        await rig.look(monkeypatch)
        restarts.append(len(rig.restarted_drafts))
    assert restarts == [0, 1, 1, 2]
    assert rig.restarted_drafts == ["model", "model"]
    assert rig.num_restarts == 0


async def test_a_target_that_died_is_left_to_ray(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    rig.client.answer = UnavailableError("gone")
    await rig.look(monkeypatch)
    assert rig.num_restarts == 0


async def test_a_target_that_stays_away_makes_the_replica_unhealthy(rig: Rig, monkeypatch: pytest.MonkeyPatch):
    rig.client.is_connected = False
    await rig.look(monkeypatch)
    rig.watchdog.check()
    rig.now_s += 301.0
    with pytest.raises(UnavailableError, match="has not been seen for 301 s"):
        rig.watchdog.check()


async def test_a_task_that_has_ended_makes_the_replica_unhealthy() -> None:
    async def fail() -> None:
        raise IndexError("unexpected")

    tasks = [
        asyncio.create_task(asyncio.sleep(60), name="watchdog"),
        asyncio.create_task(fail(), name="index-reporter"),
    ]
    check_running(tasks)
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match=r"index-reporter of this pair has ended: IndexError\('unexpected'\)"):
        check_running(tasks)
    tasks[0].cancel()
