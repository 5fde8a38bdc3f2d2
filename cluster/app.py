"""The Serve application, built from deploy.yaml's `args`: `import_path: cluster.app:build`."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray
from ray import serve
from ray.serve import Application
from ray.serve.exceptions import RayServeException
from ray.serve.schema import LoggingConfig

from actors.pair.pair import Pair
from actors.prefill_replica import Prefill
from actors.process import is_json_wanted
from actors.settings import PairSettings, ProcessShare
from cluster.config import DeployConfig, parse_config
from cluster.local.serve_environment import (
    CONNECTION_DRAIN_S,
    check_tls,
    warn_of_missing_variables,
    warn_of_open_folders,
)
from cluster.node_check import check_nodes
from cluster.placement import (
    INGRESS_CPUS,
    SHELL_CPUS,
    NodeResources,
    PairPlacement,
    log_missing_nodes,
    plan_pair,
)
from cluster.preflight import check_driver, check_files
from cluster.replica_settings import ingress_config, pair_settings, prefill_settings
from cluster.schema.replicas import SERVES_OWN_POLICY, Scaled
from cluster.topology import pin_devices, read_topology
from engine.config import EngineConfig
from protos.errors import ConfigError
from router.config import RouterConfig
from router.ingress import Ingress
from router.routing.index import IndexClient, open_prefill_index

logger = logging.getLogger(__name__)

_EXTRA_CALLS = 64  # metrics, model cards and refusals, which must get through when a pair is full
_HEALTH = {"health_check_period_s": 2.0, "health_check_timeout_s": 10.0}  # a replica is replaced after three failures
_WATCHED = {
    **_HEALTH,
    "graceful_shutdown_timeout_s": 30.0,  # after that the ingress moves running requests to another replica
}


class RefusedDeploymentError(ConfigError, RayServeException):
    """A ConfigError that Serve takes as final; after other errors it builds the application three more times."""


def build(args: dict[str, Any]) -> Application:
    """Return the application `outrider`: `Ingress` calls `Pair`, and `Pair` calls `Prefill` if `args` configure it.

    Running replicas stay untouched until this returns. In a cluster, the nodes that could hold a pair check it first.

    Raises:
        ConfigError: `args` are wrong, a model is missing or could not start, or the cluster is too small.
    """
    try:
        return _built(args)
    except ConfigError as error:
        raise RefusedDeploymentError(error.message) from None


def _built(args: dict[str, Any]) -> Application:
    # Check files and machine before anything is placed.
    asked = parse_config(args)
    if ray.is_initialized():
        _check_log_path(asked)
    config = check_files(asked, logger.warning)
    warn_of_missing_variables()
    topology = read_topology()
    check_driver(topology)
    # Place a pair, and check each node that would get one.
    placement = plan_pair(config, nodes := _nodes(), topology)
    if config.pair.gpus is not None:
        log_missing_nodes(placement, config.pair.max_replicas, nodes)
    settings = pair_settings(config, placement)
    if ray.is_initialized():
        check_tls(config.ingress)
        _warn_of_session()
        check_nodes(asked, settings, placement, nodes)
    logger.info("each pair: bundles %s, target %s, draft %s", placement.bundles, placement.target, placement.draft)
    # Bind the deployments: the ingress to the pairs, both to the prefill replicas.
    router = _router_config(config)
    pair = serve.deployment(name="Pair", **_pair_options(config, settings, placement, router))(Pair)
    ingress = cast(serve.Deployment, Ingress).options(**_ingress_options(config))
    open_index = partial(IndexClient, config=router)
    prefill = _prefill(config, settings.engine, placement, router)
    pin = partial(
        pin_devices,
        num_ranks=config.target.tensor_parallel_size,
        draft_gpu=config.draft.gpu,
        num_gpus=placement.num_gpus,
    )
    return ingress.bind(pair.bind(settings, pin, open_index, prefill), ingress_config(config), prefill)


def _check_log_path(config: DeployConfig) -> None:
    """Raise ConfigError for a relative path: each process would resolve it against its own folder."""
    log = config.tune.log
    if log is not None and not Path(log).expanduser().is_absolute():
        raise ConfigError(
            f"tune.log {log!r} is a relative path, and each process has its own folder; give an absolute path"
        )


def _warn_of_session() -> None:
    node = ray._private.worker.global_worker.node
    if node is not None:
        warn_of_open_folders(Path(node.get_session_dir_path()))


def _prefill(
    config: DeployConfig, engine: EngineConfig, placement: PairPlacement, router: RouterConfig
) -> Application | None:
    if placement.prefill is None:
        return None
    options = {
        **_prefill_options(config, placement, placement.prefill),
        **_request_router_options(router, "PrefillRouter"),
    }
    deployment = serve.deployment(name="Prefill", **options)(Prefill)
    open_index = partial(open_prefill_index, config=router)
    return deployment.bind(prefill_settings(config, engine, placement), open_index)


def _nodes() -> list[NodeResources]:
    """Return the resources of Ray's nodes, or this machine's if no cluster runs (`serve build`)."""
    if not ray.is_initialized():
        return [NodeResources(os.cpu_count() or 1, len(read_topology().devices))]
    return [
        NodeResources(
            int(each.get("CPU", 0)), int(each.get("GPU", 0)), each, node["NodeID"], node["NodeManagerAddress"]
        )
        for node in ray.nodes()
        if node["Alive"]
        for each in (node["Resources"],)
    ]


def _pair_options(
    config: DeployConfig, settings: PairSettings, placement: PairPlacement, router: RouterConfig
) -> dict[str, Any]:
    return {
        **_count(config.pair),
        "ray_actor_options": {"num_cpus": SHELL_CPUS, "num_gpus": placement.num_gpus},
        "placement_group_bundles": placement.bundles,
        "placement_group_strategy": "STRICT_PACK",
        **_logging_options(),
        "max_ongoing_requests": settings.max_requests + _EXTRA_CALLS,
        **_WATCHED,
        **_request_router_options(router, "PrefixAwareRouter"),
    }


def _logging_options() -> dict[str, Any]:
    """Return Serve's logging options: JSON if our other processes log JSON, else Serve's default."""
    return {"logging_config": LoggingConfig(encoding="JSON")} if is_json_wanted() else {}


def _count(section: Scaled) -> dict[str, Any]:
    if section.autoscaling is not None:
        return {"autoscaling_config": section.autoscaling.to_serve()}
    return {"num_replicas": section.num_replicas or 1}


def _request_router_options(router: RouterConfig, router_class: str) -> dict[str, Any]:
    if router.policy == SERVES_OWN_POLICY:
        return {}
    arguments = {
        "request_router_class": f"router.routing.serve_router:{router_class}",
        "request_router_kwargs": asdict(router),
    }
    return {"request_router_config": arguments}


def _router_config(config: DeployConfig) -> RouterConfig:
    section = config.router
    return RouterConfig(config.cache.block_size, section.policy, index_timeout_s=section.index_timeout_ms / 1000)


def _prefill_options(config: DeployConfig, placement: PairPlacement, share: ProcessShare) -> dict[str, Any]:
    # Idle OpenMP threads sleep instead of spinning, since decoding may want the same cores.
    environment = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "OMP_NUM_THREADS": str(share.num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    return {
        **_count(config.prefill),
        **_logging_options(),
        "ray_actor_options": {
            "num_cpus": share.num_cpus,
            "num_gpus": placement.num_prefill_gpus,
            "resources": dict(placement.prefill_resources),
            "runtime_env": {"env_vars": environment},
        },
        "max_ongoing_requests": config.scheduler.max_num_sequences + _EXTRA_CALLS,
        **_WATCHED,
    }


def _ingress_options(config: DeployConfig) -> dict[str, Any]:
    return {
        "num_replicas": config.ingress.num_replicas,
        **_logging_options(),
        "max_surge_percent": 100,  # a redeploy starts new replicas first, so that one always answers
        "ray_actor_options": {"num_cpus": INGRESS_CPUS},
        "max_ongoing_requests": 4096,
        **_HEALTH,
        "graceful_shutdown_timeout_s": CONNECTION_DRAIN_S,
    }
