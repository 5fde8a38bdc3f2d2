"""The CPUs and devices of each process of a pair: pure decisions over the cluster's resources.

A pair's placement group is [shell, target, draft], packed on one node. The shell's bundle holds the pair's devices,
because only there Ray names them; the shell passes them to its children in CUDA_VISIBLE_DEVICES. A prefill replica is
one process on any node, with a device of its own on GPU nodes.

If deploy.yaml demands GPUs (`pair.gpus`), shares follow from it alone: the nodes may not exist yet.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from actors.settings import ProcessShare
from cluster.config import DeployConfig
from cluster.topology import NodeTopology
from protos.errors import ConfigError

logger = logging.getLogger(__name__)

SHELL_CPUS = 0.1
INGRESS_CPUS = 0.05


@dataclass(frozen=True, slots=True)
class NodeResources:
    """The resources of one node, in whole cores and devices; Ray's id of it, and its address."""

    num_cpus: int
    num_gpus: int = 0
    all: Mapping[str, float] = field(default_factory=dict)  # by Ray's names
    node_id: str = ""
    name: str = "this machine"

    def num_places(self, demand: Mapping[str, float]) -> int:
        """Count the replicas with this demand that fit on the empty node."""
        return min(int(self.all.get(name, 0) / amount + 1e-6) for name, amount in demand.items())


@dataclass(frozen=True, slots=True)
class PairPlacement:
    """The shares of a node that one pair and one prefill replica get; `draft` is each draft's, None without drafts.

    The share of a target or a prefill replica has the threads of one rank and the CPUs of all ranks.
    """

    target: ProcessShare
    draft: ProcessShare | None
    num_gpus: int
    prefill: ProcessShare | None = None
    num_prefill_gpus: int = 0
    resources: Mapping[str, float] = field(default_factory=dict)
    prefill_resources: Mapping[str, float] = field(default_factory=dict)
    num_drafts: int = 1

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Placement group bundles of shell, target and (if they have a share) drafts."""
        shell: dict[str, float] = {"CPU": SHELL_CPUS, **self.resources}
        if self.num_gpus:
            shell["GPU"] = self.num_gpus
        drafts = [] if self.draft is None else [self.draft] * self.num_drafts
        return [shell, *({"CPU": share.num_cpus} for share in (self.target, *drafts))]

    @property
    def demand(self) -> dict[str, float]:
        """The resources that a pair takes of its node."""
        total: dict[str, float] = {}
        for bundle in self.bundles:
            for name, amount in bundle.items():
                total[name] = total.get(name, 0) + amount
        return total

    @property
    def shape(self) -> str:
        """The demand in words."""
        return ", ".join(f"{name} {amount:g}" for name, amount in self.demand.items())

    def num_places(self, nodes: Sequence[NodeResources]) -> int:
        """Count the pairs that fit on the empty nodes."""
        return sum(node.num_places(self.demand) for node in nodes)

    @property
    def prefill_demand(self) -> dict[str, float]:
        """Return the resources that a prefill replica takes of its node; empty without prefill replicas."""
        if self.prefill is None:
            return {}
        gpus = {"GPU": float(self.num_prefill_gpus)} if self.num_prefill_gpus else {}
        return {"CPU": self.prefill.num_cpus, **gpus, **self.prefill_resources}


def plan_pair(
    config: DeployConfig, nodes: list[NodeResources], topology: NodeTopology, *, is_one_process: bool = False
) -> PairPlacement:
    """Divide the cluster among its pairs and prefill replicas.

    On CPU nodes they share all cores equally. On GPU nodes each rank of a target or a prefill replica gets a device,
    and a draft gets one or shares the target's. With `is_one_process` draft models are in the target's process.

    Raises:
        ConfigError: the cluster is too small; names the need, the resources and the topology that was seen.
            `pair.gpus` is not refused for that: its pairs wait for nodes.
    """
    num_ranks, num_prefills, demand = config.target.tensor_parallel_size, config.prefill.max_replicas, config.pair.gpus
    # Four versions of the ingress at once: replicas that a redeploy has replaced finish their streams.
    ingress_cpus = 4 * INGRESS_CPUS * config.ingress.num_replicas
    if demand is not None:  # each demanded GPU has its cores, whatever the nodes of today are
        num_gpus, kind = _demanded_gpus(config, demand.count, is_one_process), demand.kind
        num_cores, prefill_threads = num_gpus * config.cores_per_gpu, config.cores_per_gpu
        unit, prefill_cpus = num_cores - ingress_cpus, float(prefill_threads * num_ranks)
    else:
        num_gpus, kind = _gpus_per_pair(config, nodes, topology, is_one_process), None
        # Divide the smallest node's cores among its pairs and prefill replicas, after the ingresses.
        num_cpus, per_node = _smallest_host(config, nodes, num_gpus)
        num_cores, unit = max(1, num_cpus // per_node), (num_cpus - ingress_cpus) / per_node
        # A prefill replica has as many cores as a pair, one process per rank.
        prefill_threads = max(1, num_cores // num_ranks)
        prefill_cpus = _hundredths(min(prefill_threads * num_ranks, unit))
    # With one GPU for both, the draft model runs in the target's process.
    is_in_target = is_one_process or num_gpus == num_ranks == 1
    num_drafts = 0 if is_in_target else len(config.draft_models)
    target, draft = _claim(config, num_drafts, num_cores, unit - SHELL_CPUS, topology)
    accelerator = {} if kind is None else {f"accelerator_type:{kind}": 0.001}  # as Ray's own `accelerator_type` does
    return PairPlacement(
        target,
        draft,
        num_gpus,
        prefill=ProcessShare(prefill_threads, prefill_cpus) if num_prefills else None,
        num_prefill_gpus=num_ranks if num_prefills and num_gpus else 0,
        resources={**accelerator, **config.pair.resources},
        prefill_resources={**accelerator, **config.prefill.resources},
        num_drafts=num_drafts,
    )


def log_missing_nodes(placement: PairPlacement, num_pairs: int, nodes: list[NodeResources]) -> None:
    """Log the number of pairs that wait until Ray's autoscaler or an operator adds nodes."""
    if (num_places := placement.num_places(nodes)) < num_pairs:
        logger.warning(
            "%d of %d pairs wait for nodes: each takes %s of one node, and today's %d nodes have %d places; "
            "`serve status` reports their start, and none computes on a processor instead",
            *(num_pairs - num_places, num_pairs, placement.shape, len(nodes), num_places),
        )


def _demanded_gpus(config: DeployConfig, count: int, is_one_process: bool) -> int:
    """Return the GPUs of `pair.gpus.count`; the pair has a process for each."""
    if count not in (wanted := _wanted_gpus(config, is_one_process)):
        raise ConfigError(
            f"pair.gpus.count is {count}, and a pair uses {' or '.join(map(str, sorted(wanted)))}: one for each of "
            f"the target's ranks (target.tensor_parallel_size {config.target.tensor_parallel_size}), and one more for "
            f"a draft model with its own (draft.gpu is {config.draft.gpu!r}); change one of them"
        )
    return count


def _smallest_host(config: DeployConfig, nodes: list[NodeResources], num_gpus: int) -> tuple[int, int]:
    """Return the cores of the smallest node that takes pairs, and the number of pairs and prefill replicas on a node.

    Nodes with GPUs take the pairs if pairs have any.
    """
    hosts = [node for node in nodes if (node.num_gpus if num_gpus else node.num_cpus)]
    if not hosts:
        raise ConfigError("no node of the cluster offers a CPU; start Ray with --num-cpus of at least 1")
    per_node = sum(math.ceil(each.max_replicas / len(hosts)) for each in (config.pair, config.prefill))
    return min(node.num_cpus for node in hosts), per_node


def _claim(
    config: DeployConfig, num_drafts: int, num_cores: int, share: float, topology: NodeTopology
) -> tuple[ProcessShare, ProcessShare | None]:
    """Claim as many CPUs as there are threads, or a proportional part of the share when it is smaller.

    Processes that compute at the same time on the same cores stall each other at every barrier. So a target and a draft
    side by side never have more threads than the pair's cores, unless the user sets more or there is one core. If they
    compute in turn they have one thread more: the draft's main thread uses the core of the target's sleeping main
    thread, while the other threads of both still spin for some milliseconds after a pass.
    """
    num_ranks, draft_threads, num_free = config.target.tensor_parallel_size, 0, num_cores
    if num_drafts:
        draft_threads = config.draft.num_threads or max(1, num_cores // 4)
        num_free = num_cores - num_drafts * draft_threads + (0 if config.speculation.is_ahead else 1)
    target_threads = config.target.num_threads or max(1, num_free // num_ranks)
    scale = min(1.0, share / (target_threads * num_ranks + num_drafts * draft_threads))
    target_cpus, draft_cpus = (_hundredths(scale * each) for each in (target_threads * num_ranks, draft_threads))
    if target_cpus < 0.01 or (draft_threads and draft_cpus < 0.01):
        raise ConfigError(
            f"a pair's share of its node is {share:.2f} CPUs, too little for a target and a draft; "
            f"lower pair.num_replicas, prefill.num_replicas or ingress.num_replicas, or add cores (seen: {topology})"
        )
    return ProcessShare(target_threads, target_cpus), ProcessShare(draft_threads, draft_cpus) if num_drafts else None


def _hundredths(num_cpus: float) -> float:
    return math.floor(100 * num_cpus) / 100


def _gpus_per_pair(
    config: DeployConfig, nodes: list[NodeResources], topology: NodeTopology, is_one_process: bool
) -> int:
    """Return a pair's GPUs: one per rank, and one more if the draft requires it, or by default if there are enough."""
    num_gpus, num_ranks = sum(node.num_gpus for node in nodes), config.target.tensor_parallel_size
    num_pairs, num_prefills = config.pair.max_replicas, config.prefill.max_replicas
    if num_gpus == 0:
        return 0
    _check_links(num_ranks, topology)
    choices = _wanted_gpus(config, is_one_process)
    for wanted in choices:
        has_places = sum(node.num_gpus // wanted for node in nodes) >= num_pairs
        if has_places and num_gpus - wanted * num_pairs >= num_prefills * num_ranks:
            return wanted
    prefills = f" and {num_prefills} prefill replicas" if num_prefills else ""
    least = min(choices)
    each = "a GPU each" if least == 1 else f"{least} GPUs each, on one node"
    remedy = "or add GPUs" if least == 1 else "target.tensor_parallel_size or draft.gpu, or add GPUs"
    if config.draft_models and _needs_own_gpu(config):
        remedy = "set speculation.mode to 'sync', which lets the draft share the target's, or add GPUs"
    raise ConfigError(
        f"{num_pairs} pairs{prefills} need {each} and the cluster has {num_gpus}; "
        f"lower pair.num_replicas (or autoscaling.max_replicas), {remedy} (seen: {topology})"
    )


def most_gpus(config: DeployConfig) -> int:
    """Return the largest number of GPUs that a pair may get: the demanded number, or one per rank and one more."""
    return max(_wanted_gpus(config)) if config.pair.gpus is None else config.pair.gpus.count


def _wanted_gpus(config: DeployConfig, is_one_process: bool = False) -> tuple[int, ...]:
    """Devices per pair, the best number first."""
    num_ranks = config.target.tensor_parallel_size
    if not config.draft_models or is_one_process or isinstance(config.draft.gpu, int):
        return (num_ranks,)
    return (num_ranks + 1,) if config.draft.gpu == "own" or _needs_own_gpu(config) else (num_ranks + 1, num_ranks)


def _needs_own_gpu(config: DeployConfig) -> bool:
    """True if the draft needs its own GPU: side by side with a target of one rank it cannot share the process."""
    return config.speculation.is_ahead and config.target.tensor_parallel_size == 1


def _check_links(num_ranks: int, topology: NodeTopology) -> None:
    largest = max(map(len, topology.groups), default=0)
    if topology.nvlinks and num_ranks > largest:
        raise ConfigError(
            f"target.tensor_parallel_size is {num_ranks}, and the largest NVLink group has {largest} GPUs; "
            f"lower it to {largest} or less (seen: {topology})"
        )
