"""Settings that recurrent layers do not support, refused by name."""

from __future__ import annotations

from engine.config import EngineConfig
from protos.errors import ConfigError


def check_target(config: EngineConfig) -> None:
    """Raise ConfigError if the drafts of a target with recurrent layers are trees, or reasoning steps."""
    speculation = config.speculation
    refused = {"speculation.tree": speculation.tree, "speculation.steps": speculation.steps}
    for name, value in refused.items():
        if value is not None:
            raise ConfigError(
                f"{name} is set, but {config.model.path!r} has recurrent layers, whose states follow one text and not "
                f"several branches; remove {name}"
            )


def refused_draft(path: str) -> ConfigError:
    """Return the error for a draft model with recurrent layers."""
    return ConfigError(
        f"{path!r} has recurrent layers, which a draft model cannot have, since it takes tokens back; "
        "choose a draft whose layers all have attention"
    )
