"""What an engine is built from: frozen, checked once, and told apart by role."""

from __future__ import annotations

from dataclasses import dataclass, field

from protos.errors import ConfigError
from protos.messages import VerifyMode


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Where a model is and how it is computed.

    `path` is a local folder or a Hub id. `dtype` is auto, bfloat16, float16 or float32; auto means bfloat16 where the
    processor computes in it, float32 elsewhere. `num_threads` is the torch thread count of the process; None leaves
    torch's choice.
    """

    path: str
    dtype: str = "auto"
    device: str = "auto"
    num_threads: int | None = None


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV pool: P tokens per block and either a number of blocks or a budget of bytes for all layers together."""

    block_size: int = 16
    num_blocks: int | None = None
    memory_bytes: int | None = 1 << 30
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"cache.block_size is {self.block_size}; it must be at least 1")
        if self.num_blocks is None and self.memory_bytes is None:
            raise ConfigError("cache has neither num_blocks nor memory_gib; set one of them")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ConfigError(f"cache.num_blocks is {self.num_blocks}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of one step and of one sequence. `max_model_len` None means the model's own number of positions."""

    max_num_sequences: int = 64
    max_tokens_per_step: int = 2048
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        if self.max_num_sequences < 1:
            raise ConfigError(f"scheduler.max_num_sequences is {self.max_num_sequences}; it must be at least 1")
        if self.max_tokens_per_step < 1:
            raise ConfigError(f"scheduler.max_tokens_per_step is {self.max_tokens_per_step}; it must be at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ConfigError(
                f"scheduler.max_model_len is {self.max_model_len}; it must be at least 2, prompt and output"
            )


@dataclass(frozen=True, slots=True)
class SpeculationConfig:
    """The defaults of a deployment, K drafts per pass and how they are verified, and the most a request may ask for."""

    num_tokens: int = 4
    verify: VerifyMode = VerifyMode.COUPLED
    max_num_tokens: int = 16

    def __post_init__(self) -> None:
        if not 0 <= self.num_tokens <= self.max_num_tokens:
            raise ConfigError(
                f"speculation.num_tokens is {self.num_tokens}; it must be between 0 and "
                f"speculation.max_num_tokens, {self.max_num_tokens}"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything `EngineCore` needs to know."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
