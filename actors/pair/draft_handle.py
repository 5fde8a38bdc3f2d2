"""The process of one draft model of a pair, as the pair's shell has it: started, restarted, exchanged and checked."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from actors.draft.draft_actor import DraftActor
from actors.draft.draft_choice import DraftChoice, DraftStart, write_choice
from actors.settings import PairSettings
from protos.errors import DeadlineExceededError, EngineError, RequestError, ServingError

_CHECK_TIMEOUT_S = 300.0
_CHECK_NICENESS = 10  # the pair that serves has the cores first
_POLL_S = 0.1


class DraftHandle:
    """A `DraftActor`, whose socket and choice lie in `folder`; its first draft is the one at `path`.

    Args:
        settings: the pair's, whose draft is the one of this process.
        folder: of this draft alone; it is made here.
        options: of the actor.
        check_options: of the process of a check, which goes with it.
    """

    def __init__(
        self, settings: PairSettings, folder: Path, options: dict[str, Any], check_options: dict[str, Any]
    ) -> None:
        folder.mkdir(exist_ok=True)
        assert settings.draft.model is not None, "it is that of a draft model"
        self.path = settings.draft.model.path
        self._settings = settings
        self._folder = folder
        self._check_options = check_options
        self._generation = 0
        self.actor: Any = ray.remote(DraftActor).options(**options).remote(settings, folder)

    def restart(self) -> None:
        """Kill the process; Ray starts a new one."""
        ray.kill(self.actor, no_restart=False)

    async def digest(self) -> str:
        """Return the digest of the draft that was loaded at the start."""
        start: DraftStart = await self.actor.start.remote()
        return start.digest

    async def check_draft(self, path: str) -> None:
        """Load the checkpoint at `path` in a process beside the draft's, and return if it could be the draft.

        Raises:
            RequestError: it could not.
            DeadlineExceededError: the check took too long.
        """
        # A process for each check: it is niced, and what it has loaded goes with it.
        check = ray.remote(**self._check_options, max_calls=1, max_retries=0)(_check_candidate)
        task = check.remote(self._settings, path)
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                await task
        except TimeoutError:
            ray.cancel(task, force=True)
            raise DeadlineExceededError(f"The draft {path!r} was not loaded within {_CHECK_TIMEOUT_S:.0f} s.") from None
        except RayTaskError as error:
            if isinstance(error.cause, ServingError):
                raise error.cause from None
            raise RequestError(f"The draft {path!r} cannot be loaded: {error.cause}", param="path") from error
        except RayError as error:
            raise RequestError(f"The process that loaded the draft {path!r} ended: {error}", param="path") from None

    async def replace_draft(self, path: str, wait_s: float) -> str:
        """Kill the draft's process, and return the digest of the one at `path` when that serves in its place.

        Raises:
            RequestError: it cannot be loaded.
            DeadlineExceededError: it does not serve within `wait_s`.
            EngineError: its process fails in another way.
        """
        self._generation += 1
        write_choice(self._folder, DraftChoice(path, self._generation))
        self.restart()
        try:
            async with asyncio.timeout(wait_s):
                start = await self._start_of(self._generation)
        except TimeoutError:
            raise DeadlineExceededError(
                f"The draft {path!r} did not serve within {wait_s:g} s; raise wait_s, or look for DraftActor in Ray's "
                "logs."
            ) from None
        except RayError as error:
            raise EngineError(f"The draft {path!r} did not start: {error}") from None
        if start.failure is not None:
            raise RequestError(f"The draft {path!r} cannot be loaded: {start.failure}", param="path")
        return start.digest

    async def _start_of(self, generation: int) -> DraftStart:
        """Return the start of the process that was chosen as `generation`; the one before may answer for a moment."""
        while True:
            try:
                start: DraftStart = await self.actor.start.remote()
                if start.generation == generation:
                    return start
            except RayActorError:  # between two processes
                pass
            await asyncio.sleep(_POLL_S)


def _check_candidate(settings: PairSettings, path: str) -> None:
    from actors.draft.candidate_check import check_candidate  # loads torch, which the shell must not

    os.nice(_CHECK_NICENESS)
    check_candidate(settings, path)
