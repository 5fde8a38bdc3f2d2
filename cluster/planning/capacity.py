"""Memory, replicas and cost of a deployment at a rate of requests."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from cluster.planning.speed_up import ReplicaPlan, SpeedUp, best_speed_up, prefill_seconds
from protos.errors import ConfigError

_GIB = 1 << 30
_USABLE = 0.9  # of a device's memory, as `cache.gpu_memory_utilization`
_BUSY = 0.8  # the part of a replica's capacity for traffic: arrivals are uneven
_STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of one replica in bytes: both models' weights, the rest for keys and values, and the streams that fit."""

    target_bytes: float
    draft_bytes: float
    pool_bytes: float
    num_streams: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """One replica at its best number of streams, and the number of replicas for a rate of requests."""

    speed_up: SpeedUp
    prefill_s: float
    requests_per_s: float
    output_tokens_per_s: float
    num_replicas: int | None  # None if no rate was given
    usd_per_million_tokens: float


def memory_of(deployment: ReplicaPlan) -> Memory:
    """Return the memory of a replica by use.

    Raises:
        ConfigError: weights and one stream do not fit.
    """
    draft = deployment.draft
    target_bytes = deployment.target.weight_bytes
    draft_bytes = draft.weight_bytes if draft else 0.0
    usable = deployment.device.memory_gib * _GIB * _USABLE * deployment.num_devices
    pool = usable - target_bytes - draft_bytes
    token_bytes = deployment.target.kv_bytes + (draft.kv_bytes if draft else 0.0)
    num_tokens = deployment.prompt_tokens + deployment.output_tokens
    num_streams = int(pool / (num_tokens * token_bytes)) if pool > 0 else 0
    if num_streams < 1:
        raise ConfigError(
            f"{deployment.num_devices} x {deployment.device.name} have {usable / _GIB:.1f} GiB to use; weights take "
            f"{(target_bytes + draft_bytes) / _GIB:.1f} and a stream of {num_tokens} tokens "
            f"{num_tokens * token_bytes / _GIB:.2f}; raise --gpus, or lower --dtype or the lengths"
        )
    return Memory(target_bytes, draft_bytes, pool, num_streams)


def capacity_of(
    deployment: ReplicaPlan,
    num_streams: int | None,
    rate: float | None,
    max_itl_ms: float | None,
    has_drafts: bool = True,
) -> Capacity:
    """Return a replica's throughput at `num_streams`, or at the best number, and the replicas for a rate of requests.

    `max_itl_ms` bounds the mean time between tokens of a stream; `has_drafts` False plans plain decoding.

    Raises:
        ConfigError: no number of streams keeps the bound, or `num_streams` do not fit in memory.
    """
    fitting = memory_of(deployment).num_streams
    if num_streams is not None and num_streams > fitting:
        raise ConfigError(f"--streams {num_streams} do not fit in memory, but {fitting} do; lower it or raise --gpus")
    choices = (num_streams,) if num_streams else tuple(n for n in _STREAMS if n <= fitting)
    found = [_at(deployment, streams, rate, has_drafts) for streams in choices]
    if max_itl_ms is not None:
        fastest = min(_itl_ms(capacity, has_drafts) for capacity in found)
        found = [capacity for capacity in found if _itl_ms(capacity, has_drafts) <= max_itl_ms]
        if not found:
            raise ConfigError(f"--max-itl-ms {max_itl_ms} cannot be kept: {fastest:.1f} is the least; raise --gpus")
    return max(found, key=lambda capacity: capacity.output_tokens_per_s)


def _speed(speed_up: SpeedUp, has_drafts: bool) -> float:
    return speed_up.tokens_per_s if has_drafts else speed_up.plain_tokens_per_s


def _itl_ms(capacity: Capacity, has_drafts: bool) -> float:
    return 1000 * capacity.speed_up.num_streams / _speed(capacity.speed_up, has_drafts)


def _at(deployment: ReplicaPlan, num_streams: int, rate: float | None, has_drafts: bool) -> Capacity:
    speed_up = best_speed_up(deployment, num_streams)
    prefill_s = prefill_seconds(deployment)
    request_s = prefill_s + deployment.output_tokens / _speed(speed_up, has_drafts)
    requests_per_s = 1.0 / request_s
    tokens_per_s = requests_per_s * deployment.output_tokens
    usd_per_s = deployment.device.price_usd_per_hour * deployment.num_devices / 3600
    return Capacity(
        speed_up=speed_up,
        prefill_s=prefill_s,
        requests_per_s=requests_per_s,
        output_tokens_per_s=tokens_per_s,
        num_replicas=ceil(rate / (_BUSY * requests_per_s)) if rate else None,
        usd_per_million_tokens=1e6 * usd_per_s / (_BUSY * tokens_per_s),
    )
