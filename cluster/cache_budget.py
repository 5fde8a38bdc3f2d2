"""How much memory the KV pools of target, draft and prefill replicas take."""

from __future__ import annotations

from dataclasses import replace

from cluster.config import DeployConfig
from cluster.schema.replicas import CacheSection
from engine.config import CacheConfig

_GIB = 1 << 30
_DEFAULT_BYTES = _GIB
_TARGET_BYTES_PER_DRAFT_BYTE = 4  # a draft's token takes a fifth of the target's or less


def cache_config(section: CacheSection) -> CacheConfig:
    """The target's pool: what the user says, or one GiB."""
    if section.num_blocks is not None:
        return CacheConfig(section.block_size, section.num_blocks, memory_bytes=None, dtype=section.dtype)
    memory_bytes = _DEFAULT_BYTES if section.memory_gib is None else int(section.memory_gib * _GIB)
    return CacheConfig(section.block_size, memory_bytes=memory_bytes, dtype=section.dtype)


def prefill_cache_config(config: DeployConfig) -> CacheConfig:
    """A prefill replica's pool: what the user says, or as much as a pair's."""
    target = cache_config(config.cache)
    if config.prefill.memory_gib is None:
        return target
    return replace(target, num_blocks=None, memory_bytes=int(config.prefill.memory_gib * _GIB))


def draft_cache_config(section: CacheSection) -> CacheConfig:
    """The draft's pool, on top of the target's: as many blocks where a number is given, else a share of its budget.

    A draft whose pool is short drafts for fewer sequences at a time, and nothing else. It is never quantised: it is
    small.
    """
    target = replace(cache_config(section), dtype="auto")
    if target.memory_bytes is None:
        return target
    return replace(target, memory_bytes=target.memory_bytes // _TARGET_BYTES_PER_DRAFT_BYTE)
