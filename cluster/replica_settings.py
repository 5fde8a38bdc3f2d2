"""The settings of pairs and prefill replicas, from the checked configuration and the placement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from actors.settings import (
    AutoTuneSettings,
    DraftSettings,
    PairSettings,
    PrefillSettings,
    ProcessShare,
)
from cluster.checkpoints import gpu_weight_bytes, resolve_model_path
from cluster.config import DeployConfig
from cluster.placement import PairPlacement
from cluster.schema.replicas import CacheSection
from engine.config import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    GraphKind,
    HeadConfig,
    KVDtype,
    ModelConfig,
    SamplingSource,
    SpeculationConfig,
)
from protos.errors import ConfigError
from protos.messages import SpeculationMethod
from router.config import IngressConfig, IngressSettings
from router.requests.reasoning_format import HARMONY, MARKS, find_reasoning
from router.tokenizer.tokenizer_files import load_tokenizer_files

PREFILL_CHUNK_TOKENS = 512  # between two transfers of KV blocks
_FRESH = "20000"  # positions logged after the alarm; the draft knows the earlier traffic


def target_cache_config(section: CacheSection, shared_part: float | None = None) -> CacheConfig:
    """Return the target's pool, less `shared_part` of the GPU's budget if a draft shares that GPU."""
    return _shared(section.to_engine(), None if shared_part is None else 1 - shared_part)


def draft_cache_config(section: CacheSection, shared_part: float | None = None) -> CacheConfig:
    """Return the draft's pool, on top of the target's: as many blocks if their number is set, else part of its budget.

    A draft with too small a pool drafts for fewer sequences at a time. Its KV is small, so it is never quantised.
    `shared_part` is the draft's part of the GPU's budget, or None if the draft has a GPU of its own.
    """
    pool = replace(section.to_engine(), dtype=KVDtype.AUTO)
    if pool.memory_bytes is None:
        return pool
    # A draft's token takes a fifth of the target's or less.
    return _shared(replace(pool, memory_bytes=pool.memory_bytes // 4), shared_part)


def _shared(pool: CacheConfig, part: float | None) -> CacheConfig:
    """Return the pool with its part of a shared GPU's budget."""
    if part is None or pool.gpu_memory_utilization is None:
        return pool
    return replace(pool, gpu_memory_utilization=part * pool.gpu_memory_utilization, counts_own_use=True)


def draft_part(target_bytes: int, draft_bytes: int) -> float:
    """Return the draft's part of a shared GPU: its share of all weights, at least a tenth."""
    return max(0.1, draft_bytes / max(1, target_bytes + draft_bytes))


def pair_settings(config: DeployConfig, placement: PairPlacement) -> PairSettings:
    """Return the settings of each pair replica."""
    engine = config.to_engine()
    own, *more = _draft_settings(config, placement)
    target = replace(engine.model, path=resolve_model_path(engine.model.path), num_threads=placement.target.num_threads)
    return PairSettings(
        engine=replace(
            engine,
            model=target,
            head=_located(engine.head),
            cache=target_cache_config(config.cache, _shared_part(config, placement)),
            speculation=_within_thoughts(config, engine.speculation),
        ),
        draft=own,
        more_drafts=tuple(more),
        target_share=placement.target,
        draft_share=placement.draft,
        kv_transport=config.prefill.kv_transport,
        max_requests=config.scheduler.max_num_sequences + config.pair.max_queued_requests,
        kv_events=None if config.pair.kv_events is None else config.pair.kv_events.endpoint,
        auto_tune=_auto_tune(config, placement),
    )


def unplaced_settings(config: DeployConfig) -> PairSettings:
    """Return the settings of a pair that has no node yet, with unknown threads and CPUs."""
    num_gpus = 0 if config.pair.gpus is None else config.pair.gpus.count
    return pair_settings(config, PairPlacement(ProcessShare(), ProcessShare(), num_gpus))


def prefill_settings(config: DeployConfig, engine: EngineConfig, placement: PairPlacement) -> PrefillSettings:
    """Return the settings of each prefill replica: the pairs' engine with its own threads, pool and chunks."""
    assert placement.prefill is not None, "prefill replicas have a share"
    keeps_head = engine.head is not None and engine.head.kind.keeps_kv
    return PrefillSettings(
        engine=replace(
            engine,
            model=replace(engine.model, num_threads=placement.prefill.num_threads, graphs=GraphConfig(GraphKind.OFF)),
            cache=config.cache.to_engine(),
            head=engine.head if keeps_head else None,
            scheduler=replace(engine.scheduler, max_tokens_per_step=PREFILL_CHUNK_TOKENS),
            log=None,
        ),
        niceness=0 if placement.num_gpus else 10,  # decoding first, then prompts
        kv_transport=config.prefill.kv_transport,
    )


def _within_thoughts(config: DeployConfig, speculation: SpeculationConfig) -> SpeculationConfig:
    """Limit reasoning steps to the model's thoughts if it marks them with a pair of tokens."""
    if speculation.steps is None:
        return speculation
    files = load_tokenizer_files(resolve_model_path(config.target.path), config.ingress.chat_template_text)
    template = files.chat_template.source if files.chat_template else ""
    found = find_reasoning(files.tokenizer, template, config.ingress.reasoning_format)
    if found is None or found.name == HARMONY:
        return speculation
    begin, end = MARKS[found.name]
    return replace(speculation, steps=replace(speculation.steps, think=(begin, end)))


def _auto_tune(config: DeployConfig, placement: PairPlacement) -> AutoTuneSettings | None:
    """Return the settings of automatic tuning, or None. Raises ConfigError for a draft model without a process."""
    tune = config.tune
    if not tune.auto or tune.folder is None:
        return None
    if placement.draft is None and config.draft.kind is SpeculationMethod.MODEL:
        raise ConfigError(
            "tune.auto exchanges a draft in a process of its own, and here it shares the target's GPU and process; "
            "set draft.gpu to 'own', or remove tune.auto"
        )
    target = resolve_model_path(config.target.path)
    options = ("--log", str(tune.folder), "--target", target, "--minutes", "10", "--fresh", _FRESH)
    return AutoTuneSettings(("-m", "cluster.cli", "tune", *options), f"{tune.folder}.drafts")


def _located(head: HeadConfig | None) -> HeadConfig | None:
    if head is None or head.path is None:
        return head
    return replace(head, path=resolve_model_path(head.path))


def _draft_settings(config: DeployConfig, placement: PairPlacement) -> Iterator[DraftSettings]:
    """Yield the deployment's own source of drafts, then its other draft models."""
    parts = iter(_draft_parts(config, placement))
    if config.draft.kind is not SpeculationMethod.MODEL:
        yield DraftSettings(config.draft.kind, code=config.draft.code or "")
    for method, path in config.draft_models.items():
        model = ModelConfig(
            resolve_model_path(path),
            config.draft.dtype,
            quantization=config.draft.quantization,
            num_threads=None if placement.draft is None else placement.draft.num_threads,
            attention=config.target.attention,
            generation_config=SamplingSource.NONE,
            graphs=GraphConfig(config.target.cuda_graphs),
        )
        cache = draft_cache_config(config.cache, next(parts))
        name = method if method in config.drafts else ""
        yield DraftSettings(SpeculationMethod.MODEL, model, cache, config.speculation.is_ahead, name)


def _draft_parts(config: DeployConfig, placement: PairPlacement) -> list[float | None]:
    """Return each draft model's part of a shared GPU; None for a GPU of its own."""
    weights = [gpu_weight_bytes(path, config.draft.quantization) for path in config.draft_models.values()]
    part = _shared_part(config, placement)
    if part is None and len(weights) == 1:
        return [None]
    all_parts = 1.0 if part is None else part
    return [all_parts * each / max(1, sum(weights)) for each in weights]


def _shared_part(config: DeployConfig, placement: PairPlacement) -> float | None:
    """Return the draft models' part of the target's GPU; None if they do not share it."""
    num_ranks, drafts = config.target.tensor_parallel_size, config.draft_models
    if not drafts or placement.num_gpus != num_ranks:
        return None
    weights = sum(gpu_weight_bytes(path, config.draft.quantization) for path in drafts.values())
    return draft_part(gpu_weight_bytes(config.target.path, config.target.quantization, num_ranks), weights)


def ingress_config(config: DeployConfig) -> IngressConfig:
    """Return the configuration of each ingress replica."""
    section = config.ingress
    shared: dict[str, Any] = {name: getattr(section, name) for name in IngressSettings.model_fields}
    shared["chat_template"] = section.chat_template_text
    for name in ("api_keys_file", "receipt_key_file"):
        if shared[name] is not None:
            shared[name] = str(Path(shared[name]).expanduser().absolute())
    model_path = resolve_model_path(config.target.path)
    return IngressConfig(model_id=config.model_id, model_path=model_path, min_pairs=config.pair.min_replicas, **shared)
