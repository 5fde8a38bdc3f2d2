"""Sampling parameters of a checkpoint, for requests that leave them out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from protos.errors import ConfigError
from protos.messages import SamplingDefaults

RANGES = {  # those that requests must keep
    "temperature": (0.0, 2.0),
    "top_k": (0, math.inf),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 10.0),
}


def defaults_of(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """Return the defaults in the contents of a generation_config.json.

    Raises:
        ConfigError: a value is out of range.
    """
    chosen = {name: value for name in RANGES if (value := generation_config.get(name)) is not None}
    for name, value in chosen.items():
        low, high = RANGES[name]
        if not isinstance(value, int | float) or not low <= value <= high:
            raise ConfigError(
                f"the model's generation_config.json has {name} {value!r}; it must be in [{low:g}, {high:g}]. Fix the "
                "file, or set target.generation_config to none"
            )
    return SamplingDefaults(**chosen)
