"""Contents of a checkpoint's generation_config.json: the tokens that end a text, and the sampling defaults."""

from __future__ import annotations

import math

from transformers import PreTrainedModel

from engine.config import SamplingSource
from protos.errors import ConfigError
from protos.messages import SamplingDefaults

# The ranges in which a request may set the same parameters.
_RANGES = {
    "temperature": (0.0, 2.0),
    "top_k": (0, math.inf),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 10.0),
}


def eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Tokens that end a text, from the generation config if there is one."""
    config = model.generation_config
    ids = config.eos_token_id if config is not None else model.config.eos_token_id
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def sampling_defaults(model: PreTrainedModel, source: SamplingSource) -> SamplingDefaults:
    """Values of what a request leaves out, by the generation config (`source` auto) or by OpenAI's API alone (none).

    Raises:
        ConfigError: `source` is another, or the checkpoint's value is out of range.
    """
    if source not in tuple(SamplingSource):
        raise ConfigError(f"target.generation_config is {source!r}; it must be {' or '.join(SamplingSource)}")
    if source == SamplingSource.NONE or model.generation_config is None:
        return SamplingDefaults()
    stated = {name: getattr(model.generation_config, name, None) for name in _RANGES}
    chosen = {name: value for name, value in stated.items() if value is not None}
    for name, value in chosen.items():
        low, high = _RANGES[name]
        if not isinstance(value, int | float) or not low <= value <= high:
            raise ConfigError(
                f"the model's generation_config.json has {name} {value!r}; it must be in [{low:g}, {high:g}]. Mend the "
                "file, or set target.generation_config to none"
            )
    return SamplingDefaults(**chosen)
