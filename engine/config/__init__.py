"""The configuration of an engine: frozen dataclasses that check themselves when constructed."""

from engine.config.engine_config import GIB, CacheConfig, EngineConfig, KVDtype, PositionLogConfig, SchedulerConfig
from engine.config.model_config import (
    AttentionKind,
    GraphConfig,
    GraphKind,
    HeadConfig,
    HeadKind,
    ModelConfig,
    ModelDtype,
    Quantization,
    SamplingSource,
)
from engine.config.speculation_config import (
    DEFAULT_RATING_PROMPT,
    MAX_DRAFT_TOKENS,
    MAX_TREE_NODES,
    ScorerKind,
    SpeculationConfig,
    StepConfig,
    TreeConfig,
    TreeKind,
)

__all__ = [
    "DEFAULT_RATING_PROMPT",
    "GIB",
    "MAX_DRAFT_TOKENS",
    "MAX_TREE_NODES",
    "AttentionKind",
    "CacheConfig",
    "EngineConfig",
    "GraphConfig",
    "GraphKind",
    "HeadConfig",
    "HeadKind",
    "KVDtype",
    "ModelConfig",
    "ModelDtype",
    "PositionLogConfig",
    "Quantization",
    "SamplingSource",
    "SchedulerConfig",
    "ScorerKind",
    "SpeculationConfig",
    "StepConfig",
    "TreeConfig",
    "TreeKind",
]
