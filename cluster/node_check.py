"""Checks of the nodes that would hold a new deployment, before Serve touches running replicas."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Sequence
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.settings import PairSettings
from cluster.config import DeployConfig
from cluster.placement import NodeResources, PairPlacement
from cluster.preflight import check_driver, check_files, check_gpu_memory, memory_remedy, replica_bytes
from cluster.topology import NodeTopology, read_topology
from engine.config import GIB
from engine.model.checkpoint.node_memory import available_bytes
from protos.errors import ConfigError, ServingError

logger = logging.getLogger(__name__)

# A method's name follows while it runs; an application's name may have dots.
_REPLICA = re.compile(r"ray::(TargetActor|DraftActor)|ray::ServeReplica:.+:(Pair|Prefill)(\.\w+(\(\))?)?$")
Finding = tuple[int, str | None]  # a node's bytes for replicas, and the reason against a start there


def check_nodes(
    config: DeployConfig, settings: PairSettings, placement: PairPlacement, nodes: Sequence[NodeResources]
) -> None:
    """Check every node that may get a pair or a prefill replica, and the memory of all of them together.

    If replicas run that would make room for the model, each node builds it without its weights. Without running
    replicas a failed start costs nothing and reports more, so nothing is built.

    Raises:
        ConfigError: a replica could not start; names the node and the reason.
    """
    demand, prefill = placement.demand, placement.prefill_demand
    num_running = _num_running_pairs()
    check_places(placement, min(num_running, config.pair.min_replicas), nodes)
    places = [(node, (node.num_places(demand), node.num_places(prefill) if prefill else 0)) for node in nodes]
    wanted = [(node, nums) for node, nums in places if any(nums)]
    is_on_gpu, is_replacing = placement.num_gpus > 0, num_running > 0
    logger.info("looking at %d nodes, %s", len(wanted), "to replace pairs" if is_replacing else "where no pair runs")
    findings = _ask([node for node, _ in wanted], config, settings if is_replacing else None, is_on_gpu=is_on_gpu)
    rooms = []
    for (node, nums), (free_bytes, obstacle) in zip(wanted, findings, strict=True):
        if obstacle is not None:
            raise ConfigError(f"on node {node.name}: {obstacle}")
        rooms.append((node.name, free_bytes, nums))
    if rooms:
        check_room(config, rooms, is_on_gpu=is_on_gpu)


def check_places(placement: PairPlacement, num_replaced: int, nodes: Sequence[NodeResources]) -> None:
    """Raise ConfigError if running pairs would be stopped for pairs that wait for nodes."""
    if (num_places := placement.num_places(nodes)) < num_replaced:
        raise ConfigError(
            f"{num_replaced} pairs that serve would be replaced, and the {len(nodes)} nodes have places for "
            f"{num_places}: each pair takes {placement.shape} of one node (pair.gpus, pair.resources); add such nodes "
            "first, or delete the application first; the new one then waits for nodes"
        )


def check_room(config: DeployConfig, rooms: Sequence[tuple[str, int, tuple[int, int]]], *, is_on_gpu: bool) -> None:
    """Raise ConfigError if a node has too little memory for one replica, or all nodes together for all replicas.

    `rooms` has each node's name, its memory for new replicas (with the memory of replicas they replace), and its places
    for pairs and for prefill replicas by Ray's count.

    With autoscaling only the least number of replicas must fit: nodes may be added for more.
    """
    sizes = replica_bytes(config, is_on_gpu=is_on_gpu)
    remedy = memory_remedy(is_on_gpu=is_on_gpu)
    for name, free_bytes, places in rooms:
        for kind, size, num_places in zip(("pair", "prefill"), sizes, places, strict=True):
            if num_places and size > free_bytes:
                raise ConfigError(
                    f"node {name} may get a replica of {kind}, which takes about {size / GIB:.1f} GiB of memory, "
                    f"and has {free_bytes / GIB:.1f} GiB for it; lower {remedy}, or keep it off that node by "
                    f"{kind}.resources"
                )
    pairs, prefills = config.pair.min_replicas, config.prefill.min_replicas
    num_fitting = sum(min(places[0], free_bytes // max(1, sizes[0])) for _, free_bytes, places in rooms)
    needed, free = pairs * sizes[0] + prefills * sizes[1], sum(free_bytes for _, free_bytes, _ in rooms)
    if config.pair.gpus is None and (pairs > num_fitting or needed > free):
        raise ConfigError(
            f"{pairs} pairs and {prefills} prefill replicas take about {needed / GIB:.1f} GiB of memory, and the "
            f"{len(rooms)} nodes for them have {free / GIB:.1f} GiB, enough for {num_fitting} pairs; lower {remedy}, "
            "or add nodes"
        )


def _ask(
    nodes: Sequence[NodeResources], config: DeployConfig, settings: PairSettings | None, *, is_on_gpu: bool
) -> list[Finding]:
    """Return the finding of each node. Raises ConfigError for a node that does not answer."""
    # Ask all nodes at once, then wait for each. This node's files are checked already.
    make_task: Any = ray.remote(num_cpus=0, max_calls=1, max_retries=0)
    look = make_task(find)
    own_id = ray.get_runtime_context().get_node_id() if settings is None else None
    asked: list[Any] = [
        None
        if node.node_id == own_id
        else look.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False)).remote(
            config, settings, is_on_gpu=is_on_gpu
        )
        for node in nodes
    ]
    found = []
    for node, reply in zip(nodes, asked, strict=True):
        if reply is None:
            found.append(_room(config, is_on_gpu=is_on_gpu))
            continue
        try:
            found.append(ray.get(reply, timeout=600.0))  # a file in GGUF is converted on each node
        except RayError as error:
            reason = str(error).strip().rpartition("\n")[2] or type(error).__name__
            raise ConfigError(
                f"node {node.name} could not be checked: {reason}; see the log of its raylet, or end the node"
            ) from None
    return found


def find(config: DeployConfig, settings: PairSettings | None, *, is_on_gpu: bool) -> Finding:
    """Check this node in a worker of its raylet: files, GPUs and, with `settings`, the models' structure."""
    os.nice(10)  # lower than running streams
    try:
        config = check_files(config, logger.info)
        if settings is not None:
            # Imported here: only the process of this check needs torch.
            from actors.draft.draft_process import check_start

            check_start(settings, is_on_gpu=is_on_gpu)
    except ServingError as error:
        return (0, error.message)
    return _room(config, is_on_gpu=is_on_gpu)


def _room(config: DeployConfig, *, is_on_gpu: bool) -> Finding:
    topology = read_topology() if is_on_gpu else NodeTopology()
    try:
        check_driver(topology)
        per_pair = config.target.tensor_parallel_size + bool(config.draft_paths)
        num_pairs = max(1, len(topology.devices) // per_pair)
        check_gpu_memory(config, topology, min(num_pairs, config.pair.max_replicas))
    except ServingError as error:
        return (0, error.message)
    return (available_bytes() + _bytes_of_replicas(), None)


def _bytes_of_replicas() -> int:
    """Return the memory of this node's running pairs and prefill replicas, which a deployment replaces.

    They and this process are children of the raylet.
    """
    raylet: Any = psutil.Process().parent()
    sizes = 0
    for process in raylet.children(recursive=True):
        try:
            title = process.cmdline()[:1]
            if title and is_replica(title[0]):
                sizes += process.memory_full_info().uss
        except psutil.Error:  # it has just ended
            continue
    return sizes


def is_replica(title: str) -> bool:
    """True for the title that Ray gives a process of a pair, or of a prefill replica."""
    return _REPLICA.match(title) is not None


def _num_running_pairs() -> int:
    actors = ray.util.list_named_actors(all_namespaces=True)
    return sum("SERVE_REPLICA" in each["name"] and "#Pair#" in each["name"] for each in actors)
