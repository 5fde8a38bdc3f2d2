"""The memory that the KV pools of drafts and prefill replicas take in addition to the target's."""

from __future__ import annotations

from dataclasses import replace

from cluster.config import DeployConfig
from cluster.schema.replicas import GIB, CacheSection
from engine.config import CacheConfig, KVDtype

_MIN_DRAFT_PART = 0.1  # of a GPU that it shares with its target
_TARGET_BYTES_PER_DRAFT_BYTE = 4  # a draft's token takes a fifth of the target's or less


def target_cache_config(section: CacheSection, shared_part: float | None = None) -> CacheConfig:
    """Return the target's pool, less `shared_part` of the GPU's budget if a draft shares that GPU."""
    target = section.to_engine()
    if shared_part is None or target.gpu_memory_utilization is None:
        return target
    share = (1 - shared_part) * target.gpu_memory_utilization
    return replace(target, gpu_memory_utilization=share, counts_own_use=True)


def prefill_cache_config(config: DeployConfig) -> CacheConfig:
    """Return a prefill replica's pool: the configured size, or a pair's."""
    target = config.cache.to_engine()
    if config.prefill.memory_gib is None:
        return target
    num_bytes = int(config.prefill.memory_gib * GIB)
    return replace(target, num_blocks=None, memory_bytes=num_bytes, gpu_memory_utilization=None)


def draft_cache_config(section: CacheSection, shared_part: float | None = None) -> CacheConfig:
    """Return the draft's pool, on top of the target's: as many blocks if their number is set, else part of its budget.

    A draft with too small a pool drafts for fewer sequences at a time. Its KV is small, so it is never quantised.
    `shared_part` is the draft's part of the GPU's budget, or None if the draft has a GPU of its own.
    """
    target = replace(section.to_engine(), dtype=KVDtype.AUTO)
    if target.memory_bytes is None:
        return target
    target = replace(target, memory_bytes=target.memory_bytes // _TARGET_BYTES_PER_DRAFT_BYTE)
    if shared_part is None or target.gpu_memory_utilization is None:
        return target
    share = shared_part * target.gpu_memory_utilization
    return replace(target, gpu_memory_utilization=share, counts_own_use=True)


def draft_part(target_bytes: int, draft_bytes: int) -> float:
    """Return the draft's part of a shared GPU: its share of all weights, at least a tenth."""
    return max(_MIN_DRAFT_PART, draft_bytes / max(1, target_bytes + draft_bytes))
