"""From the checked configuration to what pairs and prefill replicas are built from."""

from __future__ import annotations

from dataclasses import replace

from actors.settings import DraftKind, DraftSettings, PairSettings, PrefillSettings
from cluster.cache_budget import cache_config, draft_cache_config, prefill_cache_config
from cluster.config import DeployConfig
from cluster.model_path import resolve_model_path
from cluster.placement import PairPlacement
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

_PREFILL_NICENESS = 10  # on nodes where it shares cores with pairs: a waiting token is worth more than a waiting prompt


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


def _speculation_config(config: DeployConfig) -> SpeculationConfig:
    section = config.speculation
    return SpeculationConfig(
        section.num_tokens,
        VerifyMode(section.verify),
        section.max_num_tokens,
        config.offered_methods,
        section.tree.config() if section.tree is not None else None,
        section.is_adaptive,
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
