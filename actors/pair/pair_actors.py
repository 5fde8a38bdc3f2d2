"""The actors of one pair: started in the replica's placement group, restarted by Ray, killed with the replica."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.process import configure_logging
from actors.process.actor_thread import ActorThread, quick_imports
from actors.settings import (
    DraftChoice,
    DraftSettings,
    PairDevices,
    PairSettings,
    ProcessShare,
    read_choice,
    write_choice,
)
from actors.shell_messages import TARGET_SOCKET
from engine.model.checkpoint.weight_files import begin_digests
from protos.errors import DeadlineExceededError, EngineError, RequestError, ServingError
from protos.served_model import CHECK_TIMEOUT_S, digest

if TYPE_CHECKING:  # takes a second to import, and not every process calls a deployment
    from ray.serve.handle import DeploymentHandle


class TargetActor:
    """Loads the target in the background and serves the pair's shell over a socket in `folder`.

    After a death Ray restarts it with its settings alone. Its requests are lost; the ingress holds their committed
    tokens and continues them. It calls the `Prefill` deployment itself, if there is one, so that KV blocks do
    not pass through the shell or a socket.
    """

    def __init__(self, settings: PairSettings, folder: Path, prefill: DeploymentHandle[Any] | None) -> None:
        configure_logging()
        self._settings = settings
        self._folder = folder
        self._prefill = prefill
        self._thread = ActorThread("TargetActor", self._serve)

    def ready(self) -> None:
        """Return when the model is loaded and the socket listens.

        Raises:
            ConfigError: the model, its head, the pool or the limits do not fit.
        """
        self._thread.wait_ready()

    def _serve(self, is_ready: Callable[[], None]) -> None:
        # Imported here: shells and Serve's builder import this class, and must not load torch for it.
        begin_digests(self._settings.engine.model.path)
        with quick_imports():
            from actors.target.target_process import serve_target

        serve_target(self._settings, self._folder, self._prefill, is_ready)


class DraftStart(msgspec.Struct, frozen=True):
    """The outcome of a draft process's start: the choice it has loaded, or its `failure`.

    `digest` is the draft's part of the deployment's fingerprint. `generation` 0 is the draft of the settings.
    """

    generation: int
    digest: str
    failure: str | None = None


class DraftActor:
    """Loads the draft in the background and serves the target over a socket in `folder`.

    The draft is the latest choice in `folder` (`read_choice`), or else the settings' draft.
    """

    def __init__(self, settings: PairSettings, folder: Path) -> None:
        configure_logging()
        choice = read_choice(folder)
        self._generation = 0 if choice is None else choice.generation
        self._settings = settings if choice is None else settings.with_draft_at(choice.path)
        self._folder = folder
        self._thread = ActorThread("DraftActor", self._serve)

    def ready(self) -> None:
        """Return when the model is loaded and the socket listens. Raises ConfigError if it cannot be served."""
        self._thread.wait_ready()

    def start(self) -> DraftStart:
        """Wait for the outcome of this process's start, and return it."""
        try:
            self.ready()
        except ServingError as error:
            return DraftStart(self._generation, "", error.message)
        return DraftStart(self._generation, self._digest())

    def _serve(self, is_ready: Callable[[], None]) -> None:
        # Imported here: shells and Serve's builder import this class, and must not load torch for it.
        with quick_imports():
            from actors.draft.draft_process import serve_draft

        serve_draft(self._settings, self._folder, is_ready)

    def _digest(self) -> str:
        from engine.model.loader import model_version  # loads torch, as above

        model = self._settings.draft.model
        assert model is not None, "it is loaded"
        return digest(str(self._settings.draft.kind), model_version(model.path))


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
            async with asyncio.timeout(CHECK_TIMEOUT_S):
                await task
        except TimeoutError:
            ray.cancel(task, force=True)
            limit = f"{CHECK_TIMEOUT_S:.0f} s, the limit of a check"
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
            await asyncio.sleep(0.1)


def _check_candidate(settings: PairSettings, path: str) -> None:
    from actors.draft.draft_process import check_candidate  # loads torch, which the shell must not

    os.nice(10)  # the serving pair gets the cores first
    check_candidate(settings, path)


class PairActors:
    """A `TargetActor`, a `DraftActor` for each draft model with its own process, and the folder of their sockets."""

    def __init__(
        self, settings: PairSettings, folder: Path, devices: PairDevices, prefill: DeploymentHandle[Any] | None
    ) -> None:
        self.target_socket = folder / TARGET_SOCKET
        self._settings = _on_gpus(settings, devices)
        self._folder = folder
        self._devices = devices
        self._prefill = prefill
        self._target: Any = None
        self.drafts: dict[str, DraftHandle] = {}  # by method; the deployment's own comes first

    async def start(self) -> None:
        """Create the actors and wait until all of them serve.

        Raises:
            ServingError: an actor could not start.
        """
        settings, devices = self._settings, self._devices
        # Bundles of the placement group: the shell has 0, the target 1, drafts the rest.
        target = ray.remote(TargetActor).options(**_options(settings.target_share, 1, devices.targets))
        self._target = target.remote(settings, self._folder, self._prefill)
        if settings.draft_share is not None:
            self._start_drafts(settings.draft_share)
        await asyncio.gather(*(actor.ready.remote() for actor in self._actors))

    def _start_drafts(self, share: ProcessShare) -> None:
        gpus = () if self._devices.draft is None else (self._devices.draft,)
        for bundle, (method, settings) in enumerate(self._settings.of_drafts.items(), start=2):
            check_options = _options(ProcessShare(), bundle, ())
            del check_options["max_restarts"]
            options = _options(share, bundle, gpus)
            self.drafts[method] = DraftHandle(settings, self._folder / method, options, check_options)

    @property
    def _actors(self) -> list[Any]:
        return [self._target, *(draft.actor for draft in self.drafts.values())]

    def restart_target(self) -> None:
        """Kill the target's process. Ray starts a new one."""
        ray.kill(self._target, no_restart=False)

    def restart_draft(self, method: str) -> None:
        """Kill the process of a method's draft model, if it has one. Ray starts a new one."""
        if method in self.drafts:
            self.drafts[method].restart()

    def close(self) -> None:
        """Kill the actors for good and remove the folder; a second call does nothing."""
        for actor in filter(None, self._actors):
            ray.kill(actor)
        self._target = None
        self.drafts = {}
        shutil.rmtree(self._folder, ignore_errors=True)


def _on_gpus(settings: PairSettings, devices: PairDevices) -> PairSettings:
    """Make the models require their GPUs, so that a torch without GPUs is an error and not a slow pair."""
    if devices.targets:
        engine = settings.engine
        settings = replace(settings, engine=replace(engine, model=replace(engine.model, device="cuda")))
    if devices.draft is not None:
        more = tuple(map(_on_gpu, settings.more_drafts))
        settings = replace(settings, draft=_on_gpu(settings.draft), more_drafts=more)
    return settings


def _on_gpu(draft: DraftSettings) -> DraftSettings:
    return draft if draft.model is None else replace(draft, model=replace(draft.model, device="cuda"))


def _options(share: ProcessShare, bundle: int, gpus: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of an actor: its bundle, and an environment that shows it only its own devices."""
    environment = {
        "CUDA_VISIBLE_DEVICES": ",".join(gpus),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # the order of NVML and Ray
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # the bundle has no GPU, so Ray would hide these
        **share.thread_variables,
    }
    group = ray.util.get_current_placement_group()
    strategy = None if group is None else PlacementGroupSchedulingStrategy(group, bundle)
    return {
        "max_restarts": -1,
        "num_cpus": share.num_cpus,
        "runtime_env": {"env_vars": environment},
        **({"scheduling_strategy": strategy} if strategy else {}),
    }
