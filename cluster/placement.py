"""The CPUs and devices of each process of a pair: pure decisions over the cluster's resources.

A pair's placement group is [shell, target, draft], packed on one node. The shell's bundle holds the pair's devices,
because only there Ray names them; the shell passes them to its children in CUDA_VISIBLE_DEVICES. A prefill replica is
one process on any node, with a device of its own on GPU nodes.

If deploy.yaml demands GPUs (`pair.gpus`), shares follow from it alone: the nodes may not exist yet.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from actors.settings import ProcessShare
from cluster.topology import NodeTopology
from protos.errors import ConfigError

logger = logging.getLogger(__name__)

SHELL_CPUS = 0.1
INGRESS_CPUS = 0.05
_NUM_VERSIONS = 4  # of the ingress at once: replicas that a redeploy has replaced finish their streams


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
class GpuDemand:
    """The GPUs of each pair, from deploy.yaml's `pair.gpus`."""

    num_gpus: int
    cpus_per_gpu: int
    kind: str | None = None

    @property
    def resources(self) -> dict[str, float]:
        """The Ray resource of nodes with this kind of GPU."""
        # As for Ray's own `accelerator_type`.
        return {} if self.kind is None else {f"accelerator_type:{self.kind}": 0.001}


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """The processes to place. A thread count is None if the user has not set it.

    `draft_gpu` is deploy.yaml's value, for each of `num_drafts` draft models; each has `draft_threads`. With
    `is_one_process` the draft models are in the target's process. A target and its draft models compute in turn, or at
    the same time if `is_side_by_side`.

    Without `gpus` a pair gets GPUs of the present nodes. `resources` are custom Ray resources that select nodes.
    """

    num_pairs: int
    num_ingresses: int
    has_draft_model: bool
    target_threads: int | None = None
    draft_threads: int | None = None
    is_side_by_side: bool = False
    num_prefills: int = 0
    num_ranks: int = 1
    num_drafts: int = 1
    draft_gpu: str | int = "auto"
    is_one_process: bool = False
    gpus: GpuDemand | None = None
    pair_resources: Mapping[str, float] = field(default_factory=dict)
    prefill_resources: Mapping[str, float] = field(default_factory=dict)


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
        """Return the resources that a pair takes of its node."""
        total: dict[str, float] = {}
        for bundle in self.bundles:
            for name, amount in bundle.items():
                total[name] = total.get(name, 0) + amount
        return total

    @property
    def prefill_demand(self) -> dict[str, float]:
        """Return the resources that a prefill replica takes of its node; empty without prefill replicas."""
        if self.prefill is None:
            return {}
        gpus = {"GPU": float(self.num_prefill_gpus)} if self.num_prefill_gpus else {}
        return {"CPU": self.prefill.num_cpus, **gpus, **self.prefill_resources}


def plan_pair(request: PlacementRequest, nodes: list[NodeResources], topology: NodeTopology) -> PairPlacement:
    """Divide the cluster among its pairs and prefill replicas.

    On CPU nodes they share all cores equally. On GPU nodes each rank of a target or a prefill replica gets a device,
    and a draft gets one or shares the target's.

    Processes that compute at the same time on the same cores stall each other at every barrier. So a target and a draft
    side by side never have more threads than the pair's cores, unless the user sets more or there is one core. If they
    compute in turn they have one thread more: the draft's main thread uses the core of the target's sleeping main
    thread, while the other threads of both still spin for some milliseconds after a pass.

    Raises:
        ConfigError: the cluster is too small; names the need, the resources and the topology that was seen.
            `pair.gpus` is not refused for that: its pairs wait for nodes.
    """
    if request.gpus is not None:
        placement = _plan_demanded(request, request.gpus)
    else:
        placement = _plan_on(request, nodes, topology)
    kind = {} if request.gpus is None else request.gpus.resources
    return replace(
        placement,
        resources={**kind, **request.pair_resources},
        num_drafts=request.num_drafts,
        prefill_resources={**kind, **request.prefill_resources},
    )


def log_missing_nodes(placement: PairPlacement, num_pairs: int, nodes: list[NodeResources]) -> None:
    """Log the number of pairs that wait until Ray's autoscaler or an operator adds nodes."""
    demand = placement.demand
    num_places = sum(node.num_places(demand) for node in nodes)
    if num_places < num_pairs:
        shape = ", ".join(f"{name} {amount:g}" for name, amount in demand.items())
        logger.warning(
            "%d of %d pairs wait for nodes: each takes %s of one node, and today's %d nodes have %d places; "
            "`serve status` reports their start, and none computes on a processor instead",
            *(num_pairs - num_places, num_pairs, shape, len(nodes), num_places),
        )


def _plan_demanded(request: PlacementRequest, demand: GpuDemand) -> PairPlacement:
    """Give each demanded GPU its cores, without a look at the present nodes."""
    if demand.num_gpus not in (wanted := _wanted_gpus(request)):
        raise ConfigError(
            f"pair.gpus.count is {demand.num_gpus}, and a pair uses {' or '.join(map(str, sorted(wanted)))}: one for "
            f"each of the target's ranks (target.tensor_parallel_size {request.num_ranks}), and one more for a draft "
            f"model with its own (draft.gpu is {request.draft_gpu!r}); change one of them"
        )
    if request.has_draft_model and _is_in_target(request, demand.num_gpus):
        request = replace(request, has_draft_model=False)
    num_cores = demand.num_gpus * demand.cpus_per_gpu
    share = num_cores - SHELL_CPUS - _NUM_VERSIONS * INGRESS_CPUS * request.num_ingresses
    placement = _claim(request, num_cores, share, demand.num_gpus, NodeTopology())
    if not request.num_prefills:
        return placement
    prefill = ProcessShare(demand.cpus_per_gpu, demand.cpus_per_gpu * request.num_ranks)
    return replace(placement, prefill=prefill, num_prefill_gpus=request.num_ranks)


def _plan_on(request: PlacementRequest, nodes: list[NodeResources], topology: NodeTopology) -> PairPlacement:
    """Divide today's nodes."""
    # The nodes that take pairs: those with GPUs if pairs have any.
    num_gpus = _gpus_per_pair(request, nodes, topology)
    if request.has_draft_model and _is_in_target(request, num_gpus):
        request = replace(request, has_draft_model=False)
    hosts = [node for node in nodes if node.num_gpus] if num_gpus else [node for node in nodes if node.num_cpus]
    if not hosts:
        raise ConfigError("no node of the cluster offers a CPU; start Ray with --num-cpus of at least 1")
    # Divide the smallest node's cores among its pairs and prefill replicas, after the ingresses.
    pairs_per_node = math.ceil(request.num_pairs / len(hosts))
    prefills_per_node = math.ceil(request.num_prefills / len(hosts))
    num_cpus = min(node.num_cpus for node in hosts)
    num_cores = max(1, num_cpus // (pairs_per_node + prefills_per_node))
    unit = (num_cpus - _NUM_VERSIONS * INGRESS_CPUS * request.num_ingresses) / (pairs_per_node + prefills_per_node)
    placement = _claim(request, num_cores, unit - SHELL_CPUS, num_gpus, topology)
    if not request.num_prefills:
        return placement
    # A prefill replica has as many cores as a pair, one process per rank.
    prefill_threads = max(1, num_cores // request.num_ranks)
    num_prefill_cpus = _hundredths(min(prefill_threads * request.num_ranks, unit))
    return replace(
        placement,
        prefill=ProcessShare(prefill_threads, num_prefill_cpus),
        num_prefill_gpus=request.num_ranks if num_gpus else 0,
    )


def _is_in_target(request: PlacementRequest, num_gpus: int) -> bool:
    """True if the draft model runs in the target's process, as with one GPU for both."""
    return request.is_one_process or num_gpus == request.num_ranks == 1


def _claim(
    request: PlacementRequest, num_cores: int, share: float, num_gpus: int, topology: NodeTopology
) -> PairPlacement:
    """Claim as many CPUs as there are threads, or a proportional part of the share when it is smaller."""
    num_ranks, draft_threads, num_free = request.num_ranks, 0, num_cores
    if request.has_draft_model:
        draft_threads = request.draft_threads or max(1, num_cores // 4)
        num_free = num_cores - request.num_drafts * draft_threads + (0 if request.is_side_by_side else 1)
    target_threads = request.target_threads or max(1, num_free // num_ranks)
    scale = min(1.0, share / (target_threads * num_ranks + request.num_drafts * draft_threads))
    target_cpus, draft_cpus = (_hundredths(scale * each) for each in (target_threads * num_ranks, draft_threads))
    if target_cpus < 0.01 or (draft_threads and draft_cpus < 0.01):
        raise ConfigError(
            f"a pair's share of its node is {share:.2f} CPUs, too little for a target and a draft; "
            f"lower pair.num_replicas, prefill.num_replicas or ingress.num_replicas, or add cores (seen: {topology})"
        )
    draft = ProcessShare(draft_threads, draft_cpus) if draft_threads else None
    return PairPlacement(ProcessShare(target_threads, target_cpus), draft, num_gpus)


def _hundredths(num_cpus: float) -> float:
    return math.floor(100 * num_cpus) / 100


def _gpus_per_pair(request: PlacementRequest, nodes: list[NodeResources], topology: NodeTopology) -> int:
    """Return a pair's GPUs: one per rank, and one more if the draft requires it, or by default if there are enough."""
    num_gpus, num_ranks = sum(node.num_gpus for node in nodes), request.num_ranks
    if num_gpus == 0:
        return 0
    _check_links(num_ranks, topology)
    for wanted in _wanted_gpus(request):
        has_places = sum(node.num_gpus // wanted for node in nodes) >= request.num_pairs
        if has_places and num_gpus - wanted * request.num_pairs >= request.num_prefills * num_ranks:
            return wanted
    prefills = f" and {request.num_prefills} prefill replicas" if request.num_prefills else ""
    least = min(_wanted_gpus(request))
    each = "a GPU each" if least == 1 else f"{least} GPUs each, on one node"
    remedy = "or add GPUs" if least == 1 else "target.tensor_parallel_size or draft.gpu, or add GPUs"
    if request.has_draft_model and _has_to_part(request):
        remedy = "set speculation.mode to 'sync', which lets the draft share the target's, or add GPUs"
    raise ConfigError(
        f"{request.num_pairs} pairs{prefills} need {each} and the cluster has {num_gpus}; "
        f"lower pair.num_replicas (or autoscaling.max_replicas), {remedy} (seen: {topology})"
    )


def most_gpus(request: PlacementRequest) -> int:
    """Return the largest number of GPUs that a pair may get: the demanded number, or one per rank and one more."""
    return max(_wanted_gpus(request)) if request.gpus is None else request.gpus.num_gpus


def _wanted_gpus(request: PlacementRequest) -> tuple[int, ...]:
    """Devices per pair, the best number first."""
    num_ranks = request.num_ranks
    if not request.has_draft_model or request.is_one_process or isinstance(request.draft_gpu, int):
        return (num_ranks,)
    return (num_ranks + 1,) if request.draft_gpu == "own" or _has_to_part(request) else (num_ranks + 1, num_ranks)


def _has_to_part(request: PlacementRequest) -> bool:
    """True if the draft needs its own GPU: side by side with a target of one rank it cannot share the process."""
    return request.is_side_by_side and request.num_ranks == 1


def _check_links(num_ranks: int, topology: NodeTopology) -> None:
    largest = max(map(len, topology.groups), default=0)
    if topology.nvlinks and num_ranks > largest:
        raise ConfigError(
            f"target.tensor_parallel_size is {num_ranks}, and the largest NVLink group has {largest} GPUs; "
            f"lower it to {largest} or less (seen: {topology})"
        )
