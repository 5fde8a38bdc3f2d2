"""The pair's handle of one draft model's process: starts, restarts, replaces and checks it."""

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
_CHECK_NICENESS = 10  # the serving pair gets the cores first
_POLL_S = 0.1


class DraftHandle:
    """A `DraftActor` with its socket and choice in `folder`. Its first draft is at `path`.

    Args:
        settings: the pair's, with this process's draft.
        folder: this draft's alone; it is created here.
        options: the actor's.
        check_options: options of the process for one check.
    """

    def __init__(
        self, settings: PairSettings, folder: Path, options: dict[str, Any], check_options: dict[str, Any]
    ) -> None:
        folder.mkdir(exist_ok=True)
        assert settings.draft.model is not None, "the draft is a model"
        self.path = settings.draft.model.path
        self._settings = settings
        self._folder = folder
        self._check_options = check_options
        self._generation = 0
        self.actor: Any = ray.remote(DraftActor).options(**options).remote(settings, folder)

    def restart(self) -> None:
        """Kill the process. Ray starts a new one."""
        ray.kill(self.actor, no_restart=False)

    async def digest(self) -> str:
        """Return the digest of the draft loaded at the start."""
        start: DraftStart = await self.actor.start.remote()
        return start.digest

    async def check_draft(self, path: str) -> None:
        """Check in a separate process that the checkpoint at `path` can be loaded as the draft.

        Raises:
            RequestError: it cannot.
            DeadlineExceededError: the check took too long.
        """
        # One process per check: it is niced, and frees its memory when it ends.
        check = ray.remote(**self._check_options, max_calls=1, max_retries=0)(_check_candidate)
        task = check.remote(self._settings, path)
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                await task
        except TimeoutError:
            ray.cancel(task, force=True)
            limit = f"{_CHECK_TIMEOUT_S:.0f} s, the limit of a check"
            raise DeadlineExceededError(f"The draft {path!r} was not loaded within {limit}.") from None
        except RayTaskError as error:
            if isinstance(error.cause, ServingError):
                raise error.cause from None
            raise RequestError(f"The draft {path!r} cannot be loaded: {error.cause}", param="path") from error
        except RayError as error:
            raise RequestError(f"The process that loaded the draft {path!r} ended: {error}", param="path") from None

    async def replace_draft(self, path: str, wait_s: float) -> str:
        """Restart the process with the draft at `path`, and return its digest once it serves.

        Raises:
            RequestError: it cannot be loaded.
            DeadlineExceededError: it does not serve within `wait_s`.
            EngineError: its process fails for another reason.
        """
        self._generation += 1
        write_choice(self._folder, DraftChoice(path, self._generation))
        self.restart()
        try:
            async with asyncio.timeout(wait_s):
                start = await self._start_of(self._generation)
        except TimeoutError:
            raise DeadlineExceededError(
                f"The draft {path!r} did not serve within {wait_s:g} s; raise wait_s, or search Ray's logs for "
                "DraftActor."
            ) from None
        except RayError as error:
            raise EngineError(f"The draft {path!r} did not start: {error}") from None
        if start.failure is not None:
            raise RequestError(f"The draft {path!r} cannot be loaded: {start.failure}", param="path")
        return start.digest

    async def _start_of(self, generation: int) -> DraftStart:
        """Return the start outcome of choice `generation`. The old process may reply for a moment."""
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
