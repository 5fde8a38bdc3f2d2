"""One planned replica: its draft, its speed-up and memory, and the replicas and cost of a rate of requests.

Drafts have the lengths that the engine would choose, with a roofline's times instead of measured ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from cluster.planning.roofline import DeviceSpec, ModelShape, PassCost, pass_cost
from engine.accounting.acceptance import RANK_ACCEPTANCE
from engine.accounting.cost_model import RowSeconds
from engine.accounting.draft_cost import DraftPrices
from engine.accounting.length_allocation import allocate
from engine.config import GIB, MASK_KEYS, SchedulerConfig
from engine.model.checkpoint.weight_files import read_config, read_mapping
from protos.errors import ConfigError
from protos.messages import SpeculationMethod

_STREAMS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_ONE_PASS = (SpeculationMethod.PEAGLE, SpeculationMethod.DFLASH, SpeculationMethod.DSPARK)
_USUAL_LAYERS = {SpeculationMethod.DFLASH: 5, SpeculationMethod.DSPARK: 5}  # of published heads; others have 1


@dataclass(frozen=True, slots=True)
class PlannedDraft:
    """A draft whose passes read `shape`.

    Attributes:
        is_one_pass: all drafts of a sequence come from one pass over a row for each.
        keeps_kv: it reads the prompts, and has keys and values of its own.
        max_drafts: the most drafts in a pass; None without a limit.
        own: its weights and layers in addition to the target; None for all of `shape`.
    """

    shape: ModelShape
    is_one_pass: bool = False
    keeps_kv: bool = True
    max_drafts: int | None = None
    own: ModelShape | None = None

    @classmethod
    def of(
        cls, kind: SpeculationMethod, path: str | None, target: ModelShape, dtype: str, num_layers: int | None = None
    ) -> PlannedDraft | None:
        """Return a draft of `kind` for `target`; None if it comes from the text and costs nothing.

        A head without a `path` has the usual size of its kind. `num_layers` are of the target's own weights.

        Raises:
            ConfigError: a file is unreadable or lacks sizes, or a draft model has no path.
        """
        if kind is SpeculationMethod.SELF:
            shape = replace(target, dtype=dtype, num_layers=num_layers or target.num_layers)
            own = _without_tables(target, 0) if dtype == target.dtype else None  # it has no tables of its own
            return cls(shape, keeps_kv=False, own=own)
        if kind is SpeculationMethod.MEDUSA:
            return _medusa(_config_of(path), target)
        if kind is SpeculationMethod.MTP:
            # A pass reads one of the layers, and a prompt is read by all.
            count = 1 if path else num_layers or target.num_mtp_layers
            return cls(replace(target, num_layers=1), own=_without_tables(target, count))
        if kind is SpeculationMethod.MODEL:
            if path is None:
                raise ConfigError("a plan with a draft model needs --draft, its folder or a public model")
            is_parallel = not _config_of(path).keys().isdisjoint(MASK_KEYS)
            return cls(ModelShape.of(path, dtype), is_one_pass=is_parallel)
        return _head(kind, path, replace(target, dtype=dtype)) if kind.can_branch else None

    @property
    def whole(self) -> ModelShape:
        """The weights that it adds to memory, and the layers that read prompts."""
        return self.own or self.shape

    @property
    def kv_bytes(self) -> float:
        """Bytes of its own keys and values per token."""
        return self.whole.kv_bytes if self.keeps_kv else 0.0


def _without_tables(target: ModelShape, num_layers: int) -> ModelShape:
    """Return layers like the target's, under its embedding and head."""
    return replace(target, num_layers=num_layers, vocab_size=0)


def _config_of(path: str | None) -> Mapping[str, Any]:
    """Return a draft's config.json; empty for a draft that is not here."""
    if path is None or not Path(path).expanduser().exists():
        return {}
    file = Path(path).expanduser()
    return read_config(file) if file.is_dir() else read_mapping(file)


def _head(kind: SpeculationMethod, path: str | None, target: ModelShape) -> PlannedDraft:
    config = _config_of(path)
    layer = config.get("transformer_layer_config") or config
    if layer:
        layer = {**layer, "vocab_size": config.get("draft_vocab_size") or layer.get("vocab_size")}
        shape = ModelShape.from_config(path or kind, layer, target.dtype)
    else:
        dense = replace(target, num_experts=1, num_experts_per_token=1)
        shape = replace(dense, num_layers=_USUAL_LAYERS.get(kind, 1))
    section = {**config, **(config.get("dflash_config") or {})}
    num_rows = section.get("block_size")
    is_usual = kind is SpeculationMethod.DSPARK and not section.get("dspark_bonus_anchor")
    is_anchor_drafting = bool(section.get("sample_from_anchor", is_usual))  # the first row drafts too
    max_drafts = num_rows - (not is_anchor_drafting) if isinstance(num_rows, int) and num_rows > 1 else None
    return PlannedDraft(replace(shape, has_tied_head=True), kind in _ONE_PASS, max_drafts=max_drafts)


def _medusa(config: Mapping[str, Any], target: ModelShape) -> PlannedDraft:
    """Heads have no attention: as many products of the target's width as their blocks and functions to logits."""
    num_heads = config.get("medusa_num_heads") or config.get("num_heads") or 5  # as most published Medusas
    num_layers = config.get("medusa_num_layers") or config.get("num_hidden_layers") or 1
    width = num_heads * (target.vocab_size + num_layers * target.hidden_size)
    shape = replace(target, num_layers=0, vocab_size=width, has_tied_head=True)
    return PlannedDraft(shape, is_one_pass=True, keeps_kv=False, max_drafts=num_heads)


def tree_nodes(acceptance: tuple[float, ...], num_nodes: int) -> list[tuple[float, int]]:
    """Return the chance and the depth of each node of the best tree, likeliest first.

    `acceptance[d]` is the chance of a first child at depth d if its parent is accepted; its siblings share the rest
    in the proportions of `RANK_ACCEPTANCE`.
    """
    rest = 1.0 - RANK_ACCEPTANCE[0]
    levels = [(chance, *((1.0 - chance) * share / rest for share in RANK_ACCEPTANCE[1:])) for chance in acceptance]
    nodes: list[tuple[float, int]] = []
    candidates = [(1.0, 0)]  # parents
    for children in levels:
        grown = [(value * chance, depth + 1) for value, depth in candidates for chance in children]
        candidates = sorted(grown, reverse=True)[:num_nodes]
        nodes += candidates
    # A child is never likelier than its parent, so the best nodes are a tree; of equal ones the shallower is first.
    return sorted(nodes, key=lambda node: (-node[0], node[1]))[:num_nodes]


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
