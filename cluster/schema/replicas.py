"""The replicas that compute: their KV pools, their limits, and the number of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Annotated, Any

from pydantic import Field

from actors.settings import KVEventFormat, KVTransportKind
from cluster.schema.section import EngineSection, Section, one_of
from engine.config import CacheConfig, KVDtype, SchedulerConfig

GIB = 1 << 30
_ONGOING_REQUESTS = 16.0
_WORK_POLICY = "cluster.work_policy:WorkPolicy"
_COUNTED = {"CPU", "GPU", "memory", "object_store_memory"}  # by Ray itself
_MOST_GIB = 1 << 20
_MOST_REPLICAS = 10_000
_ADDRESS = r"^tcp://[^:/]+:[1-9][0-9]{0,4}$"


class CacheSection(EngineSection):
    """The KV pool of the target: a budget, or a number of blocks.

    If neither is set, it is 1 GiB on processors. On a GPU it is `gpu_memory_utilization` (0.9) of its memory, less
    weights, passes and recordings; a draft model on the target's GPU gets a part of it.

    `dtype` int8 (processors) or fp8 (GPUs of compute capability 8.9 or later) holds about twice the tokens of bfloat16
    in the same memory, and changes the target's distribution a little (docs/benchmarks.md).
    """

    block_size: int = Field(default=16, ge=1, le=1024)
    memory_gib: float | None = Field(default=None, gt=0, le=_MOST_GIB, strict=False)
    num_blocks: int | None = Field(default=None, ge=2)
    dtype: Annotated[KVDtype, one_of(*KVDtype)] = KVDtype.AUTO
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1, strict=False)

    def conflicts(self) -> Iterator[str]:
        if self.memory_gib is not None and self.num_blocks is not None:
            yield "memory_gib and num_blocks both set the size; keep one of them"
        if "gpu_memory_utilization" in self.model_fields_set and not self.is_measured:
            yield "gpu_memory_utilization sizes the pool by the GPU's memory, and its size is set; keep one of them"

    @property
    def is_measured(self) -> bool:
        """True if the pool takes the free memory of a GPU."""
        return self.memory_gib is None and self.num_blocks is None

    def to_engine(self) -> CacheConfig:
        """Return the target's pool: the configured size, or 1 GiB."""
        if self.num_blocks is not None:
            return CacheConfig(self.block_size, self.num_blocks, memory_bytes=None, dtype=self.dtype)
        memory_bytes = GIB if self.memory_gib is None else int(self.memory_gib * GIB)
        share = self.gpu_memory_utilization if self.is_measured else None
        return CacheConfig(self.block_size, memory_bytes=memory_bytes, dtype=self.dtype, gpu_memory_utilization=share)


class SchedulerSection(EngineSection):
    """Limits of one step and of one sequence."""

    max_num_sequences: int = Field(default=64, ge=1)
    max_tokens_per_step: int = Field(default=2048, ge=1)
    max_stall_passes: float | None = Field(default=1.5, gt=0.0)
    max_model_len: int | None = Field(default=None, ge=2)

    def to_engine(self) -> SchedulerConfig:
        """Return the scheduler's limits."""
        return SchedulerConfig(**self.model_dump())


class AutoscalingSection(Section):
    """The bounds of Serve's number of replicas, and its goal.

    With `ttft_s` or `itl_ms` the goal is work: one replica computes its queued prompts within `ttft_s`, and its running
    streams take at most `itl_ms` per token. Without them it is `target_ongoing_requests` per replica (16), whatever
    they cost. The number follows the reports of the last `look_back_period_s`, after the delays.
    """

    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int = Field(ge=1, le=_MOST_REPLICAS)
    ttft_s: float | None = Field(default=None, gt=0, strict=False)
    itl_ms: float | None = Field(default=None, gt=0, strict=False)
    target_ongoing_requests: float | None = Field(default=None, gt=0, strict=False)
    look_back_period_s: float = Field(default=30.0, gt=0, strict=False)
    upscale_delay_s: float = Field(default=30.0, ge=0, strict=False)
    downscale_delay_s: float = Field(default=600.0, ge=0, strict=False)

    def conflicts(self) -> Iterator[str]:
        if self.min_replicas > self.max_replicas:
            yield f"min_replicas {self.min_replicas} is above max_replicas {self.max_replicas}"
        if self.target_ongoing_requests is not None and self.follows_work:
            yield "target_ongoing_requests counts requests, and ttft_s and itl_ms are limits of work; keep one of them"

    @property
    def follows_work(self) -> bool:
        """True if there is a limit of latency to keep."""
        return self.ttft_s is not None or self.itl_ms is not None

    def to_serve(self) -> dict[str, Any]:
        """Return Serve's `autoscaling_config`."""
        bounds = self.model_dump(exclude={"ttft_s", "itl_ms", "target_ongoing_requests"})
        if not self.follows_work:
            return {**bounds, "target_ongoing_requests": self.target_ongoing_requests or _ONGOING_REQUESTS}
        limits = {"ttft_s": self.ttft_s, "itl_s": None if self.itl_ms is None else self.itl_ms / 1000}
        return {**bounds, "policy": {"policy_function": _WORK_POLICY, "policy_kwargs": limits}}


class PrefillAutoscalingSection(AutoscalingSection):
    """Autoscaling that may go down to zero: without prefill replicas the pairs read long prompts themselves."""

    min_replicas: int = Field(default=1, ge=0)


class GpusSection(Section):
    """The GPUs that each pair demands. A pair waits for a node with them, and never computes on a processor instead.

    `count` is one per rank of the target, and one more for a draft model with a GPU of its own. `kind` is Ray's name of
    an accelerator type (H100, A100-80G, L4). A pair also gets `cpus_per_gpu` cores per GPU. Prefill replicas demand
    the same kind, one GPU per rank.
    """

    count: int = Field(ge=1, le=65)
    kind: str | None = Field(default=None, min_length=1)
    cpus_per_gpu: int = Field(default=4, ge=1, le=256)


class Scaled(Section):
    """A deployment with a fixed number of replicas, or with autoscaling.

    `resources` are Ray resources that each replica takes, so that it runs only on nodes that have them.
    """

    num_replicas: int | None
    autoscaling: AutoscalingSection | None = None
    resources: dict[str, Annotated[float, Field(gt=0, strict=False)]] = Field(default={})

    @property
    def min_replicas(self) -> int:
        """The number of replicas, or the least number with autoscaling."""
        return self.autoscaling.min_replicas if self.autoscaling is not None else self.num_replicas or 1

    def conflicts(self) -> Iterator[str]:
        if self.num_replicas is not None and self.autoscaling is not None:
            yield "num_replicas and autoscaling contradict each other; keep one of them"
        for name in sorted(_COUNTED & self.resources.keys()):
            yield f"resources are custom ones of nodes, and {name} is Ray's own; remove it (pair.gpus demands GPUs)"


class KVEventsSection(Section):
    """ZeroMQ addresses where each pair publishes its cache's changes in vLLM's format, for external routers.

    Pairs of one node take consecutive ports. `format` is `map`, vLLM's present form of events, or `array`, its earlier
    one. Needs pyzmq. The events hold the tokens of prompts (docs/security.md).
    """

    endpoint: str = Field(default="tcp://127.0.0.1:5557", pattern=_ADDRESS)
    replay_endpoint: str | None = Field(default="tcp://127.0.0.1:5657", pattern=_ADDRESS)
    topic: str = Field(default="", max_length=256)
    format: Annotated[KVEventFormat, one_of(*KVEventFormat)] = KVEventFormat.MAP
    buffer_steps: int = Field(default=10_000, ge=1, le=1_000_000)

    def conflicts(self) -> Iterator[str]:
        if self.endpoint == self.replay_endpoint:
            yield "endpoint and replay_endpoint are one address; change one of them"
        if find_spec("zmq") is None:
            yield "kv_events needs pyzmq, which is not installed; pip install 'outrider[kv-events]', or remove it"


class PairSection(Scaled):
    """The number of draft-target pairs, and of requests that may wait in each before it answers 503.

    `niceness` lets other programs, such as the ingress, run before the threads that compute. The default is 5 on nodes
    without GPUs, where they share the cores. `alarm_webhook` gets a POST with a JSON object when the acceptance of a
    class of requests falls.
    """

    num_replicas: int | None = Field(default=None, ge=1, le=_MOST_REPLICAS)
    max_queued_requests: int = Field(default=256, ge=0)
    niceness: int | None = Field(default=None, ge=0, le=19)
    gpus: GpusSection | None = None
    kv_events: KVEventsSection | None = None
    alarm_webhook: str | None = Field(default=None, pattern=r"^https?://[^/]")

    @property
    def max_replicas(self) -> int:
        """Replicas that must be placeable."""
        return self.autoscaling.max_replicas if self.autoscaling else self.num_replicas or 1


class PrefillSection(Scaled):
    """Replicas that read long prompts for the pairs. While no such replica runs, each pair reads its own prompts.

    Prompts with fewer than `min_remote_prefill_tokens` uncached tokens stay with the pair. KV blocks come back every
    `chunk_tokens` by `kv_transport`: through Ray's object store, or by NIXL; auto is NIXL on GPUs if it is installed.
    Each replica has a KV pool as large as a pair's, unless `memory_gib` is set. `niceness` lets other programs run
    before its engine thread; the default is 15 on nodes without GPUs, where it shares cores with pairs.
    """

    num_replicas: int | None = Field(default=None, ge=0, le=_MOST_REPLICAS)
    autoscaling: PrefillAutoscalingSection | None = None
    min_remote_prefill_tokens: int = Field(default=512, ge=1)
    chunk_tokens: int = Field(default=512, ge=1)
    kv_transport: Annotated[KVTransportKind, one_of(*KVTransportKind)] = KVTransportKind.AUTO
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    niceness: int | None = Field(default=None, ge=0, le=19)
    memory_gib: float | None = Field(default=None, gt=0, le=_MOST_GIB, strict=False)

    @property
    def max_replicas(self) -> int:
        """Replicas that must be placeable."""
        return self.autoscaling.max_replicas if self.autoscaling else self.num_replicas or 0
