"""The configuration of an engine, with the limits of its KV pool and its scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from engine.config.model_config import HeadConfig, HeadKind, ModelConfig
from engine.config.speculation_config import SpeculationConfig
from protos.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class PositionLogConfig:
    """A folder of at most `max_bytes`."""

    folder: str
    max_bytes: int


class KVDtype(StrEnum):
    """The dtype of cached keys and values (`engine.kv_cache.kv_dtype`); INT8 and FP8 take half of bfloat16's bytes."""

    AUTO = "auto"  # the model's own dtype
    INT8 = "int8"  # on processors
    FP8 = "fp8"  # on GPUs


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV pool: P tokens per block, and a number of blocks or a budget of bytes for all layers together.

    On a GPU `gpu_memory_utilization`, if given, replaces `memory_bytes`: the pool gets what weights and activations
    leave of this share of the GPU's memory (`engine.model.gpu_memory`). With `counts_own_use` the share covers this
    process alone, and memory used by other processes does not count.

    Raises:
        ConfigError: no size is given, a size is below 1, or the share is not in (0, 1].
    """

    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int | None = 1 << 30
    enable_prefix_caching: bool = True
    dtype: KVDtype = KVDtype.AUTO
    gpu_memory_utilization: float | None = None
    counts_own_use: bool = False
    num_states: int = 256  # of recurrent layers, within the budget; the engine sets it from its limits

    def __post_init__(self) -> None:
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ConfigError(f"cache.gpu_memory_utilization is {share}; it must be above 0 and at most 1")
        if self.block_size < 1:
            raise ConfigError(f"cache.block_size is {self.block_size}; it must be at least 1")
        if self.num_blocks is None and self.memory_bytes is None:
            raise ConfigError("cache has no num_blocks and no memory_gib; set one of them")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ConfigError(f"cache.num_blocks is {self.num_blocks}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of one sequence.

    While sequences decode, a chunk of a prompt takes at most as long as `max_stall_passes` passes without prompts; with
    None, only `max_tokens_per_step` limits it. With `max_model_len` None, the limit is the model's number of positions.

    Raises:
        ConfigError: a limit of a step is below 1, `max_stall_passes` is not above 0, or `max_model_len` is below 2.
    """

    max_num_sequences: int = 64
    max_tokens_per_step: int = 2048
    max_stall_passes: float | None = 1.5
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        if self.max_num_sequences < 1:
            raise ConfigError(f"scheduler.max_num_sequences is {self.max_num_sequences}; it must be at least 1")
        if self.max_tokens_per_step < 1:
            raise ConfigError(f"scheduler.max_tokens_per_step is {self.max_tokens_per_step}; it must be at least 1")
        if self.max_stall_passes is not None and not self.max_stall_passes > 0.0:
            raise ConfigError(f"scheduler.max_stall_passes is {self.max_stall_passes}; it must be above 0, or null")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(
                f"scheduler.max_model_len is {self.max_model_len}; it must be at least 2, prompt and output"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The configuration of an `EngineCore`.

    Raises:
        ConfigError: a sharded target drafts for itself.
    """

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    head: HeadConfig | None = None  # drafts in the target's process, instead of a draft model
    min_remote_prefill_tokens: int = 512  # shorter prompts are always prefilled locally
    log: PositionLogConfig | None = None  # the target's likeliest tokens, for requests that allow logging

    def __post_init__(self) -> None:
        if self.head is not None and self.head.kind is HeadKind.SELF and self.model.tensor_parallel_size > 1:
            raise ConfigError(
                f"draft.kind is 'self' and target.tensor_parallel_size is {self.model.tensor_parallel_size}; the "
                "target's weights draft on one device: set draft.kind to a model or a head, or the size to 1"
            )
