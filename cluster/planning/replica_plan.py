"""One replica as planned: the speed-up of its drafts, its memory, and the replicas and cost of a rate of requests.

Drafts have the lengths that the engine would choose, with a roofline's times instead of measured ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil

import numpy as np

from cluster.planning.planned_draft import PlannedDraft, tree_nodes
from cluster.planning.roofline import DeviceSpec, ModelShape, PassCost, pass_cost
from engine.accounting.cost_model import RowSeconds
from engine.accounting.draft_cost import DraftPrices
from engine.accounting.length_allocation import allocate
from engine.config import GIB, SchedulerConfig
from protos.errors import ConfigError

_STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True, slots=True)
class ReplicaPlan:
    """One replica: models, devices, traffic, and each position's acceptance given acceptance of the earlier ones.

    `draft` is None if the drafts come from the text (suffix, n-gram) and cost nothing. Drafts are chains, or trees of
    up to `num_tree_nodes` where these promise more.
    """

    target: ModelShape
    draft: PlannedDraft | None
    device: DeviceSpec
    num_devices: int
    acceptance: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int
    num_tree_nodes: int = 0

    @property
    def context(self) -> int:
        """Tokens in the cache of a sequence, on average."""
        return self.prompt_tokens + self.output_tokens // 2

    def target_pass(self, num_streams: int, num_drafts: int = 0) -> PassCost:
        """Return the cost of a pass with `num_drafts` drafts in all and one row per stream."""
        rows = num_streams + num_drafts
        return pass_cost(self.target, self.device, self.num_devices, rows, num_streams, self.context)

    def draft_pass(self, num_streams: int) -> PassCost:
        """Return the cost of one pass of the draft for all streams; it has one of the target's devices.

        A pass gives each stream one draft, or the whole block of a parallel draft.
        """
        assert self.draft is not None
        num_rows = num_streams * (len(self.chances) + 1 if self.draft.is_one_pass else 1)
        return pass_cost(self.draft.shape, self.device, 1, num_rows, num_streams, self.context)

    def draft_step_s(self, num_streams: int) -> float:
        """Return the seconds of one pass of the draft for all streams, 0 for drafts from the text."""
        return self.draft_pass(num_streams).seconds if self.draft is not None else 0.0

    @property
    def chances(self) -> tuple[float, ...]:
        """The acceptance of the positions that the draft can reach."""
        return self.acceptance[: None if self.draft is None else self.draft.max_drafts]

    def num_steps(self, depths: Sequence[int]) -> list[float]:
        """Return the draft's passes for drafts as deep as these."""
        steps = accumulate(map(float, depths), max)
        return [min(step, 1.0) if self.draft is not None and self.draft.is_one_pass else step for step in steps]


@dataclass(frozen=True, slots=True)
class SpeedUp:
    """Drafts at one number of streams: drafts per stream, and tokens per second with and without them.

    `shape` is "chain", "tree" or "block": of a parallel draft.
    """

    num_streams: int
    num_drafts: float
    tokens_per_pass: float
    tokens_per_s: float
    plain_tokens_per_s: float
    shape: str = "chain"

    @property
    def factor(self) -> float:
        return self.tokens_per_s / self.plain_tokens_per_s


def best_speed_up(deployment: ReplicaPlan, num_streams: int) -> SpeedUp:
    """Return the choice of the adaptive engine at this load (`engine.accounting.length_allocation.allocate`)."""
    survival = np.cumprod(deployment.chances).tolist()
    chain = [(chance, depth) for depth, chance in enumerate(survival, 1)]
    is_block = deployment.draft is not None and deployment.draft.is_one_pass
    found = [_speed_up_of(deployment, num_streams, chain, "block" if is_block else "chain")]
    if deployment.num_tree_nodes and survival:
        tree = tree_nodes(deployment.chances, deployment.num_tree_nodes)
        found.append(_speed_up_of(deployment, num_streams, tree, "tree"))
    return max(found, key=lambda each: each.tokens_per_s)  # the first of equal ones


def _speed_up_of(deployment: ReplicaPlan, num_streams: int, nodes: Sequence[tuple[float, int]], shape: str) -> SpeedUp:
    """Return the best number of drafts of one shape, given the chance and the depth of each."""
    chances = [chance for chance, _ in nodes]
    max_drafts = num_streams * len(nodes)
    row_seconds = np.array([deployment.target_pass(num_streams, drafts).seconds for drafts in range(max_drafts + 1)])
    best = allocate(
        [chances] * num_streams,
        RowSeconds(row_seconds, np.zeros_like(row_seconds)),  # without prompts
        DraftPrices(0.0, deployment.draft_step_s(num_streams), 0.0),
        num_steps=deployment.num_steps([depth for _, depth in nodes]),
    )
    tokens = 1.0 + sum(sum(chances[:length]) for length in best.lengths) / num_streams
    return SpeedUp(
        num_streams, sum(best.lengths) / num_streams, tokens, best.tokens_per_s, best.plain_tokens_per_s, shape
    )


def replayed_speed_up(
    deployment: ReplicaPlan, num_streams: int, tokens_per_pass: float, drafts_per_pass: float, max_drafts: int
) -> float:
    """Return the speed-up of whole requests, from means per stream that include passes without drafts.

    Both ways prefill the prompts. A draft model makes `max_drafts` steps for every pass, a parallel one makes one.
    """
    prompts_s = num_streams * prefill_seconds(deployment)
    drafted_s = deployment.target_pass(num_streams, round(num_streams * drafts_per_pass)).seconds
    drafted_s += float(deployment.num_steps([0, max_drafts])[-1]) * deployment.draft_step_s(num_streams)
    plain_s = deployment.target_pass(num_streams).seconds * deployment.output_tokens
    return (prompts_s + plain_s) / (prompts_s + drafted_s * deployment.output_tokens / tokens_per_pass)


def prefill_seconds(deployment: ReplicaPlan) -> float:
    """Return the seconds to prefill one uncached prompt, in the target and in the draft."""
    total_s, start = 0.0, 0
    while start < deployment.prompt_tokens:
        rows = min(SchedulerConfig().max_tokens_per_step, deployment.prompt_tokens - start)
        context = start + rows // 2
        models = [(deployment.target, deployment.num_devices)]
        models += [(deployment.draft.whole, 1)] if deployment.draft and deployment.draft.keeps_kv else []
        total_s += sum(
            pass_cost(shape, deployment.device, number, rows, 1, context).seconds for shape, number in models
        )
        start += rows
    return total_s


def acceptance_per_position(given: Sequence[float], max_drafts: int) -> tuple[float, ...]:
    """Return one chance per position: the last given chance holds for all later positions.

    Raises:
        ConfigError: a chance is outside [0, 1].
    """
    wrong = [chance for chance in given if not 0.0 <= chance <= 1.0]
    if wrong or not given:
        raise ConfigError(
            f"acceptance {wrong[0] if wrong else '(none)'} is not a probability; give numbers from 0 to 1"
        )
    return tuple(given[min(position, len(given) - 1)] for position in range(max_drafts))


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
    draft_bytes = draft.whole.weight_bytes if draft else 0.0
    usable = deployment.device.memory_gib * GIB * 0.9 * deployment.num_devices  # as `cache.gpu_memory_utilization`
    pool = usable - target_bytes - draft_bytes
    has_latents = deployment.device.caches_latents(deployment.num_devices)
    token_bytes = deployment.target.cached_bytes(has_latents=has_latents) + (draft.kv_bytes if draft else 0.0)
    num_tokens = deployment.prompt_tokens + deployment.output_tokens
    num_streams = int(pool / (num_tokens * token_bytes)) if pool > 0 else 0
    if num_streams < 1:
        raise ConfigError(
            f"{deployment.num_devices} x {deployment.device.name} have {usable / GIB:.1f} GiB to use; weights take "
            f"{(target_bytes + draft_bytes) / GIB:.1f} and a stream of {num_tokens} tokens "
            f"{num_tokens * token_bytes / GIB:.2f}; raise --gpus, or lower --dtype or the lengths"
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
    busy = 0.8  # the part of a replica's capacity for traffic: arrivals are uneven
    usd_per_s = deployment.device.price_usd_per_hour * deployment.num_devices / 3600
    return Capacity(
        speed_up=speed_up,
        prefill_s=prefill_s,
        requests_per_s=requests_per_s,
        output_tokens_per_s=tokens_per_s,
        num_replicas=ceil(rate / (busy * requests_per_s)) if rate else None,
        usd_per_million_tokens=1e6 * usd_per_s / (busy * tokens_per_s),
    )
