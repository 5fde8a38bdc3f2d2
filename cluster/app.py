"""Builds the Serve application from deploy.yaml's `args`: `import_path: cluster.app:build`."""

from __future__ import annotations

import logging
import os
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import ray
from ray import serve
from ray.serve import Application

from actors.pair import Pair
from actors.prefill import Prefill
from actors.settings import DraftKind, DraftSettings, PairSettings, PrefillSettings, ProcessShare
from cluster.cache_budget import cache_config, draft_cache_config, prefill_cache_config
from cluster.config import DeployConfig, parse_config
from cluster.model_path import resolve_model_path
from cluster.placement import (
    INGRESS_CPUS,
    SHELL_CPUS,
    NodeResources,
    PairPlacement,
    PlacementRequest,
    pin_devices,
    plan_pair,
)
from cluster.sections.faces import SERVES_OWN_POLICY
from cluster.sections.replicas import Scaled
from cluster.serve_environment import warn_of_missing_variables
from cluster.topology import read_topology
from engine.config import (
    DraftVocabulary,
    EngineConfig,
    GraphConfig,
    GraphKind,
    HeadConfig,
    HeadKind,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from protos.messages import VerifyMode
from router.config import IngressConfig, IngressLimits, RouterConfig
from router.index_client import IndexClient
from router.ingress import Ingress

logger = logging.getLogger(__name__)

_EXTRA_CALLS = 64  # metrics, model cards and refusals, which must get through when a pair is full
_DRAIN_S = 30.0
_WATCHED = {"health_check_period_s": 2.0, "health_check_timeout_s": 10.0, "graceful_shutdown_timeout_s": _DRAIN_S}
_PREFILL_NICENESS = 10  # on nodes where it shares cores with pairs: a waiting token is worth more than a waiting prompt


def build(args: dict[str, Any]) -> Application:
    """The application `outrider`: `Ingress` in front of `Pair`, and `Prefill` behind it where it is asked for.

    Raises:
        ConfigError: `args` are wrong, a model is missing, or the cluster cannot hold what they ask for.
    """
    config = parse_config(args)
    warn_of_missing_variables()
    placement = plan_pair(_placement_request(config), _nodes(), read_topology())
    settings = pair_settings(config, placement)
    logger.info("each pair: bundles %s, target %s, draft %s", placement.bundles, placement.target, placement.draft)
    router = _router_config(config)
    pair = serve.deployment(name="Pair", **_pair_options(config, settings, placement, router))(Pair)
    ingress = cast(serve.Deployment, Ingress).options(**_ingress_options(config))
    open_index = partial(IndexClient, config=router)
    prefill = _prefill(config, settings.engine, placement)
    pin = partial(pin_devices, num_ranks=config.target.tensor_parallel_size, draft_gpu=config.draft.gpu)
    return ingress.bind(pair.bind(settings, pin, open_index, prefill), _ingress_config(config), prefill)


def pair_settings(config: DeployConfig, placement: PairPlacement) -> PairSettings:
    """What each pair replica is started with."""
    threads = placement.target.num_threads
    target = ModelConfig(
        resolve_model_path(config.target.path),
        config.target.dtype,
        quantization=config.target.quantization,
        num_threads=threads,
        attention=config.target.attention,
        deterministic=config.target.deterministic,
        tensor_parallel_size=config.target.tensor_parallel_size,
        generation_config=config.target.generation_config,
        graphs=config.target.graphs(),
    )
    return PairSettings(
        engine=EngineConfig(
            model=target,
            cache=cache_config(config.cache),
            scheduler=SchedulerConfig(**config.scheduler.model_dump()),
            speculation=_speculation_config(config),
            head=_head_config(config),
            min_remote_prefill_tokens=config.prefill.min_remote_prefill_tokens,
            overlap=config.target.overlapped_passes == "auto",
        ),
        draft=_draft_settings(config, placement),
        target_share=placement.target,
        draft_share=placement.draft,
        kv_transport=config.prefill.kv_transport,
        max_requests=config.scheduler.max_num_sequences + config.pair.max_queued_requests,
    )


def prefill_settings(config: DeployConfig, engine: EngineConfig, placement: PairPlacement) -> PrefillSettings:
    """What each prefill replica is started with: the engine of the pairs, but for its threads, pool and chunks."""
    assert placement.prefill is not None, "prefill replicas have a share"
    keeps_head = engine.head is not None and engine.head.kind.keeps_kv
    return PrefillSettings(
        engine=replace(
            engine,
            model=replace(engine.model, num_threads=placement.prefill.num_threads, graphs=GraphConfig(GraphKind.OFF)),
            cache=prefill_cache_config(config),
            head=engine.head if keeps_head else None,
            scheduler=replace(engine.scheduler, max_tokens_per_step=config.prefill.chunk_tokens),
        ),
        niceness=_prefill_niceness(config, placement),
        kv_transport=config.prefill.kv_transport,
    )


def _prefill_niceness(config: DeployConfig, placement: PairPlacement) -> int:
    if config.prefill.niceness is not None:
        return config.prefill.niceness
    return 0 if placement.num_gpus else _PREFILL_NICENESS


def _prefill(config: DeployConfig, engine: EngineConfig, placement: PairPlacement) -> Application | None:
    if placement.prefill is None:
        return None
    deployment = serve.deployment(name="Prefill", **_prefill_options(config, placement, placement.prefill))(Prefill)
    return deployment.bind(prefill_settings(config, engine, placement))


def _speculation_config(config: DeployConfig) -> SpeculationConfig:
    section = config.speculation
    return SpeculationConfig(
        section.num_tokens,
        VerifyMode(section.verify),
        section.max_num_tokens,
        config.offered_methods,
        section.tree.config() if section.tree is not None else None,
        section.adaptive,
        section.steps.config() if section.steps is not None else None,
        section.num_guess_tokens,
    )


def _head_config(config: DeployConfig) -> HeadConfig | None:
    draft = config.draft
    if draft.kind not in tuple(HeadKind):
        return None
    return HeadConfig(HeadKind(draft.kind), None if draft.path is None else resolve_model_path(draft.path))


def _draft_settings(config: DeployConfig, placement: PairPlacement) -> DraftSettings:
    draft = config.draft
    if draft.kind != DraftKind.MODEL or draft.path is None or placement.draft is None:
        return DraftSettings(DraftKind(draft.kind))
    model = ModelConfig(
        resolve_model_path(draft.path),
        draft.dtype,
        quantization=draft.quantization,
        num_threads=placement.draft.num_threads,
        attention=draft.attention,
        generation_config="none",
        graphs=config.target.graphs(),
    )
    fan_out = config.speculation.fan_out if config.speculation.mode == "async" else None
    return DraftSettings(
        DraftKind.MODEL, model, draft_cache_config(config.cache), fan_out, DraftVocabulary(draft.vocabulary)
    )


def _placement_request(config: DeployConfig) -> PlacementRequest:
    return PlacementRequest(
        num_pairs=config.pair.max_replicas,
        num_ingresses=config.ingress.num_replicas,
        has_draft_model=config.draft.kind == DraftKind.MODEL,
        target_threads=config.target.num_threads,
        draft_threads=config.draft.num_threads,
        is_side_by_side=config.speculation.mode == "async",
        num_prefills=config.prefill.max_replicas,
        prefill_threads=config.prefill.num_threads,
        num_ranks=config.target.tensor_parallel_size,
        draft_gpu=config.draft.gpu,
    )


def _nodes() -> list[NodeResources]:
    """What Ray's nodes offer, or this machine where the application is built without a cluster (`serve build`)."""
    if not ray.is_initialized():
        return [NodeResources(os.cpu_count() or 1, len(read_topology().devices))]
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    return [NodeResources(int(each.get("CPU", 0)), int(each.get("GPU", 0))) for each in resources]


def _pair_options(
    config: DeployConfig, settings: PairSettings, placement: PairPlacement, router: RouterConfig
) -> dict[str, Any]:
    return {
        **_count(config.pair),
        "ray_actor_options": {"num_cpus": SHELL_CPUS, "num_gpus": placement.num_gpus},
        "placement_group_bundles": placement.bundles,
        "placement_group_strategy": "STRICT_PACK",
        "max_ongoing_requests": settings.max_requests + _EXTRA_CALLS,
        **_WATCHED,
        **_request_router_options(router),
    }


def _count(section: Scaled) -> dict[str, Any]:
    if section.autoscaling is not None:
        return {"autoscaling_config": section.autoscaling.model_dump()}
    return {"num_replicas": section.num_replicas or 1}


def _request_router_options(router: RouterConfig) -> dict[str, Any]:
    if router.policy == SERVES_OWN_POLICY:
        return {}
    arguments = {
        "request_router_class": "router.serve_router:PrefixAwareRouter",
        "request_router_kwargs": asdict(router),
    }
    return {"request_router_config": arguments}


def _router_config(config: DeployConfig) -> RouterConfig:
    section = config.router
    return RouterConfig(
        block_size=config.cache.block_size,
        policy=section.policy,
        others_weight=section.others_weight,
        index_timeout_s=section.index_timeout_ms / 1000,
    )


def _prefill_options(config: DeployConfig, placement: PairPlacement, share: ProcessShare) -> dict[str, Any]:
    # Idle OpenMP threads sleep instead of spinning, since decoding may want the same cores.
    environment = {"OMP_NUM_THREADS": str(share.num_threads), "OMP_WAIT_POLICY": "PASSIVE"}
    return {
        **_count(config.prefill),
        "ray_actor_options": {
            "num_cpus": share.num_cpus,
            "num_gpus": placement.num_prefill_gpus,
            "runtime_env": {"env_vars": environment},
        },
        "max_ongoing_requests": config.scheduler.max_num_sequences + _EXTRA_CALLS,
        **_WATCHED,
    }


def _ingress_options(config: DeployConfig) -> dict[str, Any]:
    return {
        "num_replicas": config.ingress.num_replicas,
        "max_surge_percent": 100,  # a redeploy starts the new ones first, so that somebody always answers
        "ray_actor_options": {"num_cpus": INGRESS_CPUS},
        "max_ongoing_requests": 4096,
        "graceful_shutdown_timeout_s": _DRAIN_S,
    }


def _ingress_config(config: DeployConfig) -> IngressConfig:
    keys = config.ingress.api_keys_file
    return IngressConfig(
        model_id=config.model_id,
        model_path=resolve_model_path(config.target.path),
        api_keys_file=None if keys is None else str(Path(keys).expanduser().absolute()),
        tool_format=config.ingress.tool_format,
        limits=IngressLimits(**config.ingress.limits.model_dump()),
    )
