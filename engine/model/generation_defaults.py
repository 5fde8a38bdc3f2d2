"""Defaults of a checkpoint: end tokens and sampling parameters."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from engine.config import SamplingSource
from engine.model.checkpoint.end_tokens import find_end_tokens
from protos.errors import ConfigError
from protos.messages import SamplingDefaults

logger = logging.getLogger(__name__)

# The ranges that requests must keep for the same parameters.
_RANGES = {
    "temperature": (0.0, 2.0),
    "top_k": (0, math.inf),
    "top_p": (1e-6, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (1e-6, 10.0),
}


def eos_token_ids(
    model: PreTrainedModel, folder: Path, vocab_size: int, template: str | None = None
) -> tuple[int, ...]:
    """Return the tokens that end a text, from all files of the model; log if no file names one."""
    ends = find_end_tokens(folder, vocab_size, model.config.get_text_config().eos_token_id, template)
    if ends.unknown_ids:
        logger.warning("%s", unknown_ends(ends.unknown_ids, vocab_size))
    if ends.token_ids:
        logger.info("end tokens are %s", list(ends.token_ids))
    else:
        logger.warning(
            "%s names no end token: texts end at max_tokens, and constrained output is refused; add eos_token_id to "
            "its generation_config.json",
            folder,
        )
    return ends.token_ids


def unknown_ends(token_ids: Sequence[int], vocab_size: int) -> str:
    """Return the warning about end tokens that the model has no row for."""
    return f"end tokens {list(token_ids)} are left out: the model has {vocab_size} tokens"


def sampling_defaults(model: PreTrainedModel, source: SamplingSource) -> SamplingDefaults:
    """Return defaults for unset parameters, from the generation config (`source` auto) or OpenAI's API (none).

    Raises:
        ConfigError: `source` is unknown, or the checkpoint's value is out of range.
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
                f"the model's generation_config.json has {name} {value!r}; it must be in [{low:g}, {high:g}]. Fix the "
                "file, or set target.generation_config to none"
            )
    return SamplingDefaults(**chosen)
