"""How much of a node each process of a pair gets, and which devices: pure decisions over what the cluster has.

A pair's placement group is [shell, target, draft], packed on one node. Its devices are held by the shell's bundle,
because only there Ray tells which ones they are; the shell hands them to its children by CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from actors.settings import PairDevices, ProcessShare
from cluster.topology import NodeTopology, read_topology
from protos.errors import ConfigError

logger = logging.getLogger(__name__)

SHELL_CPUS = 0.1
INGRESS_CPUS = 0.1


@dataclass(frozen=True, slots=True)
class NodeResources:
    """What one node offers, in whole cores and devices."""

    num_cpus: int
    num_gpus: int = 0


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What must be placed; thread counts are None where the user left them to us."""

    num_pairs: int
    num_ingresses: int
    has_draft_model: bool
    target_threads: int | None = None
    draft_threads: int | None = None


@dataclass(frozen=True, slots=True)
class PairPlacement:
    """One pair's share of a node. Without a draft model there is no draft process."""

    target: ProcessShare
    draft: ProcessShare | None
    num_gpus: int

    @property
    def bundles(self) -> list[dict[str, float]]:
        """Placement group bundles of shell, target and (if it has a share) draft."""
        shell: dict[str, float] = {"CPU": SHELL_CPUS}
        if self.num_gpus:
            shell["GPU"] = self.num_gpus
        return [shell, *({"CPU": share.num_cpus} for share in (self.target, self.draft) if share)]


def plan_pair(request: PlacementRequest, nodes: list[NodeResources], topology: NodeTopology) -> PairPlacement:
    """Divide the cluster among its pairs: on CPU nodes all cores, on GPU nodes one or two devices each.

    Two processes that want the same cores stall each other at every barrier, so the threads of target and draft
    together never exceed the cores their pair owns unless the user says so (or there is but one core).

    Raises:
        ConfigError: the cluster is too small; says what is needed, what is there and which topology was seen.
    """
    num_gpus = _gpus_per_pair(request, nodes, topology)
    hosts = [node for node in nodes if node.num_gpus] if num_gpus else [node for node in nodes if node.num_cpus]
    if not hosts:
        raise ConfigError("no node of the cluster offers a CPU; start Ray with --num-cpus of at least 1")
    pairs_per_node = math.ceil(request.num_pairs / len(hosts))
    num_cpus = min(node.num_cpus for node in hosts)
    threads = _threads(request, max(1, num_cpus // pairs_per_node))
    # Twice the ingresses: during a redeploy the old ones and the new ones run side by side.
    share = (num_cpus - 2 * INGRESS_CPUS * request.num_ingresses) / pairs_per_node - SHELL_CPUS
    return _claim(threads, share, num_gpus, topology)


@dataclass(frozen=True, slots=True)
class _Threads:
    target: int
    draft: int


def _threads(request: PlacementRequest, num_cores: int) -> _Threads:
    draft = 0
    if request.has_draft_model:
        draft = request.draft_threads or max(1, num_cores // 4)
    return _Threads(request.target_threads or max(1, num_cores - draft), draft)


def _claim(threads: _Threads, share: float, num_gpus: int, topology: NodeTopology) -> PairPlacement:
    """Claim as many CPUs as there are threads, or a proportional part of the share when it is smaller."""
    scale = min(1.0, share / (threads.target + threads.draft))
    target_cpus, draft_cpus = (math.floor(100 * scale * each) / 100 for each in (threads.target, threads.draft))
    if target_cpus < 0.01 or (threads.draft and draft_cpus < 0.01):
        raise ConfigError(
            f"a pair's share of its node is {share:.2f} CPUs, too little for a target and a draft; "
            f"lower pair.num_replicas or ingress.num_replicas, or add cores (seen: {topology})"
        )
    draft = ProcessShare(threads.draft, draft_cpus) if threads.draft else None
    return PairPlacement(ProcessShare(threads.target, target_cpus), draft, num_gpus)


def _gpus_per_pair(request: PlacementRequest, nodes: list[NodeResources], topology: NodeTopology) -> int:
    """Two devices for target and draft where all pairs can have two, else one that they share."""
    if not any(node.num_gpus for node in nodes):
        return 0
    for wanted in (2, 1) if request.has_draft_model else (1,):
        if sum(node.num_gpus // wanted for node in nodes) >= request.num_pairs:
            return wanted
    raise ConfigError(
        f"{request.num_pairs} pairs need a GPU each and the cluster has {sum(node.num_gpus for node in nodes)}; "
        f"lower pair.num_replicas (or autoscaling.max_replicas), or add GPUs (seen: {topology})"
    )


def choose_devices(assigned: tuple[int, ...], topology: NodeTopology) -> PairDevices:
    """Divide the devices Ray gave a pair; two of them must be neighbours if the node has any.

    Raises:
        ConfigError: the node has NVLink, and these devices lie in different groups.
    """
    if not assigned:
        return PairDevices()
    target, draft = assigned[0], assigned[-1]
    if topology.nvlinks and draft not in topology.group_of(target):
        raise ConfigError(
            f"the pair was given GPUs {target} and {draft}, which no NVLink joins; free a whole group, "
            f"or start Ray with CUDA_VISIBLE_DEVICES set to complete groups (seen: {topology})"
        )
    return PairDevices(target, draft)


def pin_devices(assigned: tuple[int, ...]) -> PairDevices:
    """`choose_devices` on the node this runs on."""
    devices = choose_devices(assigned, topology := read_topology())
    if assigned:
        logger.info("target on GPU %s, draft on GPU %s of %s", devices.target, devices.draft, topology)
    return devices
