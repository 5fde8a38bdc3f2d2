"""Limit of a model's positions: past it a token's distribution would depend on the sequences computed beside it."""

from __future__ import annotations

from transformers import PreTrainedConfig


def max_positions(config: PreTrainedConfig) -> int | None:
    """Return the number of positions that keep a token's distribution free of its batch mates; None without a limit.

    Rotary scalings that depend on the longest sequence of a pass are held below the length where they begin to change,
    and chunked attention below its first chunk.
    """
    config = config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "attention_chunk_size")
    limits = [getattr(config, name, None) for name in names]
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        limits.append(rope.get("original_max_position_embeddings"))
    return min((limit for limit in limits if limit), default=None)
