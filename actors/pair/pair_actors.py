"""The actors of one pair: started in the replica's placement group, restarted by Ray, killed with the replica."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.handle import DeploymentHandle
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.draft.draft_actor import DraftActor
from actors.draft.draft_choice import DraftChoice, DraftStart, write_choice
from actors.settings import PairDevices, PairSettings, ProcessShare
from actors.shell_messages import TARGET_SOCKET
from actors.target.target_actor import TargetActor
from protos.errors import DeadlineExceededError, EngineError, RequestError, ServingError

logger = logging.getLogger(__name__)

_SHORT_SPIN = "1000"  # iterations of libgomp: some 20 us
_TARGET_BUNDLE = 1
_DRAFT_BUNDLE = 2
_CHECK_TIMEOUT_S = 300.0
_CHECK_NICENESS = 10  # the pair that serves has the cores first
_POLL_S = 0.1


class PairActors:
    """A `TargetActor`, a `DraftActor` where the settings name one, and the folder of their sockets."""

    def __init__(
        self, settings: PairSettings, folder: Path, devices: PairDevices, prefill: DeploymentHandle[Any] | None
    ) -> None:
        self.target_socket = folder / TARGET_SOCKET
        self._settings = _on_gpus(settings, devices)
        self._folder = folder
        self._devices = devices
        self._prefill = prefill
        self._actors: list[Any] = []
        self._generation = 0

    async def start(self) -> None:
        """Create the actors and wait until both serve.

        Raises:
            ServingError: an actor could not start.
        """
        settings, devices = self._settings, self._devices
        target = ray.remote(TargetActor).options(**_options(settings.target_share, _TARGET_BUNDLE, devices.targets))
        self._actors = [target.remote(settings, self._folder, self._prefill)]
        if settings.draft_share is not None:
            gpus = () if devices.draft is None else (devices.draft,)
            draft = ray.remote(DraftActor).options(**_options(settings.draft_share, _DRAFT_BUNDLE, gpus))
            self._actors.append(draft.remote(settings, self._folder))
        await asyncio.gather(*(actor.ready.remote() for actor in self._actors))

    def restart_target(self) -> None:
        """Kill the target's process; Ray starts a new one."""
        ray.kill(self._actors[0], no_restart=False)

    def restart_draft(self) -> bool:
        """Kill the draft's process, and return True, if there is one; Ray starts a new one."""
        for draft in self._actors[1:]:
            ray.kill(draft, no_restart=False)
        return len(self._actors) > 1

    async def draft_digest(self) -> str:
        """Return the digest of the draft that was loaded at the start."""
        start: DraftStart = await self._actors[1].start.remote()
        return start.digest

    async def check_draft(self, path: str) -> None:
        """Load the checkpoint at `path` in a process beside the draft's, and return if it could be the draft.

        Raises:
            RequestError: it could not.
            DeadlineExceededError: the check took too long.
        """
        options = _options(ProcessShare(), _DRAFT_BUNDLE, ())
        del options["max_restarts"]
        # A process for each check: it is niced, and what it has loaded goes with it.
        check = ray.remote(**options, max_calls=1, max_retries=0)(_check_candidate)
        task = check.remote(self._settings, path)
        try:
            async with asyncio.timeout(_CHECK_TIMEOUT_S):
                await task
        except TimeoutError:
            ray.cancel(task, force=True)
            raise DeadlineExceededError(f"The draft {path!r} was not loaded within {_CHECK_TIMEOUT_S:.0f} s.") from None
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, ServingError) else error from None
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
        self.restart_draft()
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
                start: DraftStart = await self._actors[1].start.remote()
                if start.generation == generation:
                    return start
            except RayActorError:  # between two processes
                pass
            await asyncio.sleep(_POLL_S)

    def close(self) -> None:
        """Kill the actors for good and remove the folder; a second call does nothing."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        shutil.rmtree(self._folder, ignore_errors=True)


def _on_gpus(settings: PairSettings, devices: PairDevices) -> PairSettings:
    """Have the models demand the GPUs that they were given: a torch that sees none is an error, and no slow pair."""
    if devices.targets:
        engine = settings.engine
        settings = replace(settings, engine=replace(engine, model=replace(engine.model, device="cuda")))
    if devices.draft is not None and settings.draft.model is not None:
        draft = settings.draft
        settings = replace(settings, draft=replace(draft, model=replace(settings.draft.model, device="cuda")))
    return settings


def _options(share: ProcessShare, bundle: int, gpus: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of an actor: its bundle, and an environment in which it sees its devices alone.

    Where our kernels were compiled, which have threads of their own (`engine/native/team.c`), OpenMP's threads compute
    between them alone: they sleep after some microseconds, since they would keep the cores from ours. Elsewhere they
    compute all, and their default of some milliseconds bridges the gaps between products: with an immediate sleep a
    fifth of the cores idles during a pass.
    """
    environment = {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as NVML and Ray count
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the bundle has no GPU of its own, and Ray would hide these
        "OMP_NUM_THREADS": str(share.num_threads),
        **({"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", _SHORT_SPIN)} if _has_kernels() else {}),
    }
    group = ray.util.get_current_placement_group()
    strategy = None if group is None else PlacementGroupSchedulingStrategy(group, bundle)
    return {
        "max_restarts": -1,
        "num_cpus": share.num_cpus,
        "runtime_env": {"env_vars": environment},
        **({"scheduling_strategy": strategy} if strategy else {}),
    }


def _check_candidate(settings: PairSettings, path: str) -> None:
    from actors.draft.candidate_check import check_candidate  # loads torch, which the shell must not

    os.nice(_CHECK_NICENESS)
    check_candidate(settings, path)


def _has_kernels() -> bool:
    return find_spec("engine._native") is not None and os.environ.get("OUTRIDER_NATIVE") != "0"
