"""Loads a head by its configuration."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from engine.config import HeadConfig, HeadKind, Quantization
from engine.model.draft_heads.eagle3 import Eagle3Head, load_eagle3
from engine.model.draft_heads.medusa import MedusaHeads, load_medusa
from engine.model.draft_heads.mtp import MtpHead, load_mtp
from engine.model.linear.packed_linear import Linear, linear_of
from protos.errors import ConfigError

Head = MedusaHeads | Eagle3Head | MtpHead


def load_head(
    config: HeadConfig, target: PreTrainedModel, device: torch.device, quantization: Quantization = Quantization.NONE
) -> Head:
    """Return the head that `config` names, on `device`, for `target` as loaded by transformers, with all layers.

    `quantization` is the target's; an EAGLE-3 head uses it too.

    Raises:
        ConfigError: it does not exist, is incomplete, or does not fit the target.
    """
    if config.kind is HeadKind.MTP:
        return load_mtp(target, device)
    assert config.kind is not HeadKind.SELF, "the runner makes it of its own model"
    if config.path is None:
        raise ConfigError(f"draft.kind {str(config.kind)!r} needs draft.path, the head's folder or Hub id")
    if config.kind is HeadKind.EAGLE3:
        return load_eagle3(config.path, target, device, quantization)
    return load_medusa(config.path, target, device)


def whole_lm_head(target: PreTrainedModel, device: torch.device) -> Linear:
    """Return the target's function from states to logits, on `device`, for a head of a sharded target."""
    head: Any = target.get_output_embeddings()
    return linear_of(head.weight.to(device), None if head.bias is None else head.bias.to(device))
