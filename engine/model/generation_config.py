"""The settings of generation in a checkpoint: the limit of positions, end tokens and sampling defaults.

Past the limit a token's distribution would depend on the batch.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from engine.config import SamplingSource
from engine.model.checkpoint.end_tokens import find_end_tokens
from engine.model.checkpoint.sampling_defaults import RANGES, defaults_of
from protos.errors import ConfigError
from protos.messages import SamplingDefaults

logger = logging.getLogger(__name__)

_SIZES = ("max_position_embeddings", "n_positions")
_OTHER_SIZES = ("max_target_positions", "max_seq_len", "max_sequence_length", "model_max_length", "seq_length", "n_ctx")
_LENGTH = re.compile(r"window|length|position|chunk|max_seq|seq_len|n_ctx|floor_scale|context")
# Names that look like lengths. Windows are read from masks, positions are limited, recurrent layers are computed by row
# and not in chunks; the others count no text tokens.
_READ = re.compile(
    r".*window.*|(original_)?max_position_embeddings|n_positions|attention_chunk_size|floor_scale|(max|min)_length"
    r"|(mamba_)?chunk_size|chunk_size_feed_forward|prompt_length|position_embedding_type"
    r"|cross_.*|vision_.*|image_.*|audio_.*|mask_.*"
)


def max_positions(config: PreTrainedConfig) -> int | None:
    """Return the number of positions whose distributions do not depend on the batch; None without a limit.

    Rotary scalings that depend on the longest sequence of a pass are limited to the length before they change, chunked
    attention to its first chunk. YaRN multiplies the original positions by `factor`, for both meanings of
    `max_position_embeddings`.
    """
    config = config.get_text_config()
    limits = [getattr(config, name, None) for name in _SIZES]
    if not any(limits):
        limits = [getattr(config, name, None) for name in _OTHER_SIZES]
    limits = [max(filter(None, (limit, _stretched(config)))) for limit in limits if limit]
    limits.append(getattr(config, "attention_chunk_size", None))
    limits += [rope.get("original_max_position_embeddings") for rope in _ropes(config) if _depends_on_length(rope)]
    return min((limit for limit in limits if limit), default=None)


def length_limit(config: PreTrainedConfig, configured: int | None, num_slots: int) -> int:
    """Return the most tokens of a sequence. Raises ConfigError if configured above the model's positions."""
    positions = max_positions(config) or num_slots
    if configured is not None and configured > positions:
        raise ConfigError(
            f"scheduler.max_model_len is {configured}, but the model has {positions} positions; lower it, "
            "or scale them in its config.json, for example by YaRN"
        )
    return positions if configured is None else configured


def unread_lengths(config: PreTrainedConfig) -> dict[str, int]:
    """Return the lengths in a configuration that are not read and are below the position limit."""
    limit = max_positions(config)
    values = config.get_text_config().to_dict()
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int)
        and not isinstance(value, bool)
        and 1 < value < (limit or value + 1)
        and _LENGTH.search(name)
        and name not in _OTHER_SIZES[: 0 if any(values.get(size) for size in _SIZES) else None]
        and not _READ.fullmatch(name)
    }


def unread_warning(config: PreTrainedConfig) -> str | None:
    """Return a warning about the lengths in a configuration that are not read, or None."""
    named = ", ".join(f"{name} {value}" for name, value in unread_lengths(config).items())
    return f"config.json has {named}, which are not read: longer texts may come out wrong" if named else None


def _stretched(config: PreTrainedConfig) -> int | None:
    """Return the positions after YaRN's scaling if all layers have it, else None."""
    lengths = [_yarn_length(rope) for rope in _ropes(config) if rope.get("rope_type")]
    return min(lengths) if lengths and all(lengths) else None  # type: ignore[type-var]  # none is None


def _yarn_length(rope: dict[str, Any]) -> int | None:
    factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
    if rope.get("rope_type") != "yarn" or not factor or not original:
        return None
    return int(factor * original + 0.5)


def _ropes(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Return the parameters of the rotary embeddings; kinds of layers may have their own."""
    rope = getattr(config, "rope_parameters", None) or {}
    return [rope, *(each for each in rope.values() if isinstance(each, dict))]


def _depends_on_length(rope: dict[str, Any]) -> bool:
    return rope.get("rope_type") in ("dynamic", "longrope")


def eos_token_ids(
    model: PreTrainedModel, folder: Path, vocab_size: int, template: str | None = None
) -> tuple[int, ...]:
    """Return the tokens that end a text, from all files of the model; log if no file names one."""
    assumed = getattr(model.config.get_text_config(), "eos_token_id", None)
    ends, unknown = find_end_tokens(folder, vocab_size, assumed, template)
    if unknown:
        logger.warning("%s", unknown_ends(unknown, vocab_size))
    if ends:
        logger.info("end tokens are %s", list(ends))
    else:
        logger.warning(
            "%s names no end token: texts end at max_tokens, and constrained output is refused; add eos_token_id to "
            "its generation_config.json",
            folder,
        )
    return ends


def unknown_ends(token_ids: Sequence[int], vocab_size: int) -> str:
    """Return the warning about end tokens that the model has no row for."""
    return f"end tokens {list(token_ids)} are left out: the model has {vocab_size} tokens"


def sampling_defaults(model: PreTrainedModel, source: SamplingSource) -> SamplingDefaults:
    """Return defaults for unset parameters, from the generation config (`source` auto) or OpenAI's API (none).

    Raises:
        ConfigError: the checkpoint's value is out of range.
    """
    if source == SamplingSource.NONE or model.generation_config is None:
        return SamplingDefaults()
    return defaults_of({name: getattr(model.generation_config, name, None) for name in RANGES})
