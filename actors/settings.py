"""The settings of pairs and prefill replicas; `cluster` fills them in from deploy.yaml and the node's resources.

An admin's choice of another draft is a file in the folder of its process, which reads it at the next start.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path

import msgspec

from engine.config import CacheConfig, EngineConfig, ModelConfig
from protos.messages import SpeculationMethod

_CHOICE_FILE = "draft.json"
_SHORT_SPIN = "1000"  # iterations of libgomp: some 20 us
NO_GAIN = 3  # the exit status of `outrider tune` if no training gave a better draft


class KVTransportKind(StrEnum):
    """The transport of KV blocks from prefill replicas to pairs."""

    AUTO = "auto"  # NIXL on GPUs where it is installed, else the object store
    OBJECT_STORE = "object_store"
    NIXL = "nixl"


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """The deployment's own source of drafts, of any method except hybrid; or an additional draft model with a `name`.

    `model` and `cache` are set if the kind is a model. It runs in a `DraftActor` if the pair has a share for one, else
    in the target's process. A head's files are in the engine's configuration. With `is_ahead` it also drafts ahead of
    verification. `code` is the class of kind python.
    """

    kind: SpeculationMethod = SpeculationMethod.NONE
    model: ModelConfig | None = None
    cache: CacheConfig | None = None
    is_ahead: bool = False
    name: str = ""
    code: str = ""

    @property
    def method(self) -> str:
        """The method name that selects this draft."""
        return self.name or self.kind


@dataclass(frozen=True, slots=True)
class ProcessShare:
    """One process's share of its node: torch's threads, and the CPUs Ray accounts for it."""

    num_threads: int = 1
    num_cpus: float = 0.0

    @property
    def thread_variables(self) -> dict[str, str]:
        """The environment of the process's threads, which counts until torch is loaded.

        With our compiled kernels, which have their own threads (`engine/native/team.c`), OpenMP's threads only compute
        between kernels. They must sleep after some microseconds, or they would keep the cores from ours. Without the
        kernels they compute everything, and their default spin of some milliseconds bridges the gaps between products:
        with an immediate sleep a fifth of the cores would idle during a pass.
        """
        has_kernels = find_spec("engine._native") is not None and os.environ.get("OUTRIDER_NATIVE") != "0"
        spin = {"GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", _SHORT_SPIN)} if has_kernels else {}
        return {"OMP_NUM_THREADS": str(self.num_threads), **spin}


@dataclass(frozen=True, slots=True)
class PairDevices:
    """The GPUs of the target, by rank, and of the draft; empty on a CPU.

    An id is a value for CUDA_VISIBLE_DEVICES: a node-wide index, a UUID, or a MIG instance's UUID.
    """

    targets: tuple[str, ...] = ()
    draft: str | None = None


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """The settings of a prefill replica.

    `engine.scheduler.max_tokens_per_step` is the chunk size, and blocks leave after each chunk. `niceness` is added to
    the niceness of the engine's thread, so that prefill gives way to decoding on shared cores.
    """

    engine: EngineConfig
    niceness: int = 0
    kv_transport: KVTransportKind = KVTransportKind.AUTO


@dataclass(frozen=True, slots=True)
class AutoTuneSettings:
    """The response to a drift alarm: the trainer of a new draft.

    `command` has arguments for Python, without `--draft` and `--output`. The drafts are put into `folder`.
    """

    command: tuple[str, ...]
    folder: str


@dataclass(frozen=True, slots=True)
class PairSettings:
    """The settings of a pair's shell and its actors.

    `more_drafts` are draft models next to the deployment's own. With a `draft_share` each draft model has its own
    process; without one all run in the target's. `max_requests` counts running and queued requests.
    """

    engine: EngineConfig
    draft: DraftSettings = DraftSettings()
    target_share: ProcessShare = ProcessShare()
    draft_share: ProcessShare | None = None  # of each draft model, if they have their own processes
    kv_transport: KVTransportKind = KVTransportKind.AUTO
    max_requests: int = 320
    kv_events: str | None = None  # address where changes of the prefix cache are published
    auto_tune: AutoTuneSettings | None = None  # an alarm starts the training of a new draft
    more_drafts: tuple[DraftSettings, ...] = ()

    @property
    def of_drafts(self) -> dict[str, PairSettings]:
        """Settings with one draft model each, by its method. The deployment's own draft comes first."""
        models = (each for each in (self.draft, *self.more_drafts) if each.model is not None)
        return {each.method: replace(self, draft=each, more_drafts=()) for each in models}

    def with_draft_at(self, path: str) -> PairSettings:
        """Return the settings with the draft model at `path`."""
        model = self.draft.model
        assert model is not None, "the pair has a draft model"
        return replace(self, draft=replace(self.draft, model=replace(model, path=path)))


class DraftChoice(msgspec.Struct, frozen=True):
    """A folder with a checkpoint; `generation` counts the choices of a draft process, from 1.

    A target drafts with the head `tried`, and goes back to the one at `path` if it dies.
    """

    path: str
    generation: int = 0
    tried: str = ""


def write_choice(folder: Path, choice: DraftChoice) -> None:
    """Make the next start of the process in `folder` load `choice`. The write is atomic."""
    file = folder / f"{_CHOICE_FILE}.new"
    file.write_bytes(msgspec.json.encode(choice))
    os.replace(file, folder / _CHOICE_FILE)


def read_choice(folder: Path) -> DraftChoice | None:
    """Return the latest choice; None if the settings' draft was never replaced."""
    try:
        return msgspec.json.decode((folder / _CHOICE_FILE).read_bytes(), type=DraftChoice)
    except FileNotFoundError:
        return None
