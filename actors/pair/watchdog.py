"""Detects a target that is dead or stuck while its socket stays open."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from actors.pair.target_client import PONG_TIMEOUT_S, TargetClient
from actors.shell_messages import Pong
from actors.target.engine_loop import STEP_TIMEOUT_S
from protos.errors import UnavailableError

logger = logging.getLogger(__name__)

_RESTART_TIMEOUT_S = 300.0  # for a target or a draft to come back


class Watchdog:
    """Pings the target once a second. Fences and restarts a target that does not respond or makes no progress.

    A draft that is silent for longer than a restart may take is restarted too.

    Args:
        client: the connection to the target.
        restart: kills the target's process.
        on_pong: gets every `Pong`.
        restart_draft: kills the process of a method's draft.
        clock: seconds.
    """

    def __init__(
        self,
        client: TargetClient,
        restart: Callable[[], None],
        on_pong: Callable[[Pong], None],
        restart_draft: Callable[[str], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._restart = restart
        self._on_pong = on_pong
        self._clock = clock
        self._restart_draft = restart_draft
        self._seen_at_s = clock()
        self._began_at_s = clock()
        self._drafts_restarted_at_s: dict[str, float] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            if self._client.is_connected:
                await self._check_target()

    def check(self) -> None:
        """Raise UnavailableError if the target has been away for longer than a restart may take."""
        away_s = self._clock() - self._seen_at_s
        if away_s > _RESTART_TIMEOUT_S:
            raise UnavailableError(
                f"the target has not been seen for {away_s:.0f} s, and a restart may take "
                f"{_RESTART_TIMEOUT_S:.0f} s; look for TargetActor in Ray's logs"
            )

    async def _check_target(self) -> None:
        try:
            pong = await self._client.ping()
        except UnavailableError:
            return  # the target has just died, and the client has dropped it
        except TimeoutError:
            self._give_up(f"it did not answer a ping within {PONG_TIMEOUT_S:g} s")
            return
        self._seen_at_s = self._clock()
        self._on_pong(pong)
        for method, draft in pong.drafts.items():
            self._check_draft(method, draft.silent_s)
        if pong.stalled_s > STEP_TIMEOUT_S:
            self._give_up(f"it has work and made no progress for {pong.stalled_s:.0f} s")

    def _check_draft(self, method: str, silent_s: float) -> None:
        now_s = self._clock()
        if min(silent_s, now_s - self._drafts_restarted_at_s.get(method, self._began_at_s)) > _RESTART_TIMEOUT_S:
            logger.error("restarting the draft %s: it has been silent for %.0f s", method, silent_s)
            self._drafts_restarted_at_s[method] = now_s
            self._restart_draft(method)

    def _give_up(self, reason: str) -> None:
        logger.error("restarting the target: %s", reason)
        self._client.fence()
        self._restart()


def check_running(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Raise UnavailableError if a task that should run forever has ended. Nothing else would notice."""
    for task in tasks:
        if task.done():
            reason = "cancelled" if task.cancelled() else repr(task.exception())
            raise UnavailableError(f"{task.get_name()} of this pair has ended: {reason}")
