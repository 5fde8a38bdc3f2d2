"""Probe of the attention of each layer of a stock model: its KV, or a refusal if a paged pool cannot keep it.

Families that do not call the function, call it in some layers only (the others keep a recurrent state), call it twice,
or hide a sliding window in a mask are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from engine.attention.base import LayerOptions, UnsupportedAttentionError
from engine.attention.torch_attention import ATTENTION_NAME, PASS_KEYWORD
from engine.kv_cache.pool import LayerShape
from protos.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One layer's attention."""

    layer: int
    shape: LayerShape
    options: LayerOptions


@dataclass(slots=True)
class RecordingPass:
    """An `AttentionPass` that computes nothing and records the call of every layer."""

    records: list[LayerRecord] = field(default_factory=list)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        shape = LayerShape(num_kv_heads=key.shape[1], key_dim=key.shape[3], value_dim=value.shape[3])
        self.records.append(LayerRecord(layer, shape, options))
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


@torch.inference_mode()
def record_attention(model: PreTrainedModel) -> list[LayerRecord]:
    """Switch `model` to our attention, run it on two tokens, and return one record per layer, first to last.

    Raises:
        ConfigError: the family does not go along.
    """
    recording = RecordingPass()
    keywords: Mapping[str, object] = {PASS_KEYWORD: recording}
    positions = torch.arange(2, device=model.device)[None]
    try:
        model.set_attn_implementation(ATTENTION_NAME)
        model(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False, **keywords)
    except (UnsupportedAttentionError, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise refusal(model, str(error)) from error
    records = sorted(recording.records, key=lambda record: record.layer)
    config = model.config.get_text_config()
    if [record.layer for record in records] != list(range(config.num_hidden_layers)):
        num_layers = config.num_hidden_layers
        raise refusal(model, f"{len(records)} calls of the attention function came from its {num_layers} layers")
    _check_windows(model, records, config)
    return records


def refusal(model: PreTrainedModel, reason: str) -> ConfigError:
    """The error for a family that cannot be served, with what can be done about it."""
    return ConfigError(
        f"model type {model.config.model_type!r} cannot be served: {reason}; choose a family whose layers all use "
        "transformers' AttentionInterface (Llama, Qwen, Mistral, Gemma, Phi, GPT-2, OPT, Mixtral, gpt-oss and others)"
    )


def _check_windows(model: PreTrainedModel, records: list[LayerRecord], config: PreTrainedConfig) -> None:
    """A family may keep its window in its mask alone, which we never see; its long contexts would come out wrong."""
    for record, kind in zip(records, getattr(config, "layer_types", None) or [], strict=False):
        if kind == "sliding_attention" and record.options.window is None:
            raise refusal(model, f"layer {record.layer} has a sliding window that it does not pass to its attention")
