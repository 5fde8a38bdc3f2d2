"""The memory that the KV pools of drafts and prefill replicas take beside the target's."""

from __future__ import annotations

from dataclasses import replace

from cluster.config import DeployConfig
from cluster.schema.replicas import GIB, CacheSection
from engine.config import CacheConfig, KVDtype

_TARGET_BYTES_PER_DRAFT_BYTE = 4  # a draft's token takes a fifth of the target's or less


def prefill_cache_config(config: DeployConfig) -> CacheConfig:
    """Return a prefill replica's pool: the size that is set, or that of a pair's."""
    target = config.cache.to_engine()
    if config.prefill.memory_gib is None:
        return target
    return replace(target, num_blocks=None, memory_bytes=int(config.prefill.memory_gib * GIB))


def draft_cache_config(section: CacheSection) -> CacheConfig:
    """Return the draft's pool, on top of the target's: as many blocks if their number is set, else part of its budget.

    A draft whose pool is short drafts for fewer sequences at a time, and nothing else. It is never quantised: it is
    small.
    """
    target = replace(section.to_engine(), dtype=KVDtype.AUTO)
    if target.memory_bytes is None:
        return target
    return replace(target, memory_bytes=target.memory_bytes // _TARGET_BYTES_PER_DRAFT_BYTE)
