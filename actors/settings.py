"""The settings of pairs and prefill replicas; `cluster` fills them from deploy.yaml and the node's resources."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from engine.config import CacheConfig, DraftVocabulary, EngineConfig, ModelConfig
from protos.messages import SpeculationMethod


class KVTransportKind(StrEnum):
    """The way of KV blocks from prefill replicas to pairs."""

    AUTO = "auto"  # NIXL on GPUs where it is installed, else the object store
    OBJECT_STORE = "object_store"
    NIXL = "nixl"


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """The deployment's own source of drafts: any method but hybrid; or one more draft model, by its `name`.

    `model` and `cache` are set where the kind is a model, which runs in a `DraftActor` if the pair has a share for one,
    else in the target's process. A head's files are in the engine's configuration. `vocabulary` is how a model's tokens
    become the target's. `fan_out` is the number of outcomes per position of a pass for which it drafts ahead; None: it
    drafts on request only.
    """

    kind: SpeculationMethod = SpeculationMethod.NONE
    model: ModelConfig | None = None
    cache: CacheConfig | None = None
    fan_out: int | None = None
    vocabulary: DraftVocabulary = DraftVocabulary.AUTO
    name: str = ""

    @property
    def method(self) -> str:
        """The method of requests that this draft is for."""
        return self.name or self.kind


@dataclass(frozen=True, slots=True)
class ProcessShare:
    """One process's share of its node: torch's threads, and the CPUs Ray accounts for it."""

    num_threads: int = 1
    num_cpus: float = 0.0


@dataclass(frozen=True, slots=True)
class PairDevices:
    """GPUs of the target, rank by rank, and of the draft; none where they run on the CPU.

    An id is as CUDA_VISIBLE_DEVICES takes it: a node-wide index, a UUID, or that of a MIG instance.
    """

    targets: tuple[str, ...] = ()
    draft: str | None = None


@dataclass(frozen=True, slots=True)
class PrefillSettings:
    """The settings of a prefill replica.

    `engine.scheduler.max_tokens_per_step` is the chunk after which blocks leave. `niceness` is added to that
    of the engine's thread, so that reading prompts gives way to decoding on the cores they share. A replica that
    has prompts and reads none of them on for `step_timeout_s` is replaced.
    """

    engine: EngineConfig
    niceness: int = 0
    kv_transport: KVTransportKind = KVTransportKind.AUTO
    start_timeout_s: float = 1800.0
    step_timeout_s: float = 120.0


class KVEventFormat(StrEnum):
    """The form of an event in vLLM's versions."""

    MAP = "map"
    ARRAY = "array"


@dataclass(frozen=True, slots=True)
class KVEventSettings:
    """The ZeroMQ addresses at which a pair publishes the changes of its prefix cache, in vLLM's format.

    A second pair of a node takes the next port of each. `buffer_steps` batches can be had again at `replay_endpoint`.
    """

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""
    format: KVEventFormat = KVEventFormat.MAP
    buffer_steps: int = 10_000


@dataclass(frozen=True, slots=True)
class AutoTuneSettings:
    """The answer to a drift alarm: the trainer of a new draft.

    `command` are arguments of Python, but for `--draft` and `--output`. It trains for `minutes`; its drafts are folders
    in `folder`. After an alarm none is answered for `pause_s`.
    """

    command: tuple[str, ...]
    folder: str
    minutes: float
    pause_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class PairSettings:
    """The settings with which a pair's shell starts its actors and judges their health.

    `more_drafts` are draft models beside the deployment's own. Each draft model has a process with a `draft_share`, or
    all are in the target's.

    `niceness` is added to that of the threads that compute, so that they give way to those that answer clients.
    `max_requests` counts running and queued ones. A target that answers no ping for `pong_timeout_s`, or has work of
    which nothing comes for `step_timeout_s`, is killed and restarted; one that is not back after `restart_timeout_s`
    makes the replica unhealthy.
    """

    engine: EngineConfig
    draft: DraftSettings = DraftSettings()
    target_share: ProcessShare = ProcessShare()
    draft_share: ProcessShare | None = None  # of each draft model; set where they have processes
    niceness: int = 0
    kv_transport: KVTransportKind = KVTransportKind.AUTO
    max_requests: int = 320
    start_timeout_s: float = 1800.0
    pong_timeout_s: float = 10.0
    step_timeout_s: float = 120.0
    restart_timeout_s: float = 300.0
    kv_events: KVEventSettings | None = None
    alarm_webhook: str | None = None  # gets a POST for each alarm that begins
    auto_tune: AutoTuneSettings | None = None  # an alarm is answered by a new draft
    more_drafts: tuple[DraftSettings, ...] = ()

    @property
    def of_drafts(self) -> dict[str, PairSettings]:
        """Settings with one draft model each, by its method; the deployment's own comes first."""
        models = (each for each in (self.draft, *self.more_drafts) if each.model is not None)
        return {each.method: replace(self, draft=each, more_drafts=()) for each in models}
