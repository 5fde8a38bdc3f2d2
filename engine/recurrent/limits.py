"""The number of recurrent states, and settings that recurrent layers do not support, refused by name."""

from __future__ import annotations

from engine.config import EngineConfig, TreeConfig
from protos.errors import ConfigError


def check_target(config: EngineConfig) -> None:
    """Raise ConfigError if the drafts of a target with recurrent layers are trees, or reasoning steps."""
    speculation = config.speculation
    refused = (
        ("speculation.tree", speculation.tree, "whose states follow one text and not several branches"),
        ("speculation.steps", speculation.steps, "which would keep a state for each token of a step until its score"),
    )
    for name, value, reason in refused:
        if value is not None:
            raise ConfigError(f"{name} is set, but {config.model.path!r} has recurrent layers, {reason}; remove {name}")


def check_draft(path: str, tree: TreeConfig | None) -> None:
    """Raise ConfigError if the drafts of a draft model with recurrent layers, at `path`, are trees."""
    if tree is not None:
        raise ConfigError(
            f"speculation.tree is set, but the draft {path!r} has recurrent layers, whose states follow one text and "
            "not several branches; remove speculation.tree, or choose a draft whose layers all have attention"
        )


def num_states(config: EngineConfig) -> int:
    """Return the most states that a model's sequences use: before a pass, after each row, and snapshots of prefixes."""
    per_sequence = 2 + config.speculation.max_num_tokens + 4  # four snapshots
    return 1 + config.scheduler.max_num_sequences * per_sequence
