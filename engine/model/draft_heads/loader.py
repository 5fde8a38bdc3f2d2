"""Loads a head by its configuration."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from engine.config import HeadConfig, HeadKind, Quantization
from engine.model.draft_heads.checkpoint import (
    Weights,
    head_folder,
    read_config,
    read_mask_embedding,
    read_tensors,
    understood,
)
from engine.model.draft_heads.dflash import DFlashHead
from engine.model.draft_heads.eagle3 import Eagle3Head, ParallelEagleHead
from engine.model.draft_heads.layers import HeadReader
from engine.model.draft_heads.medusa import MedusaHeads, load_medusa
from engine.model.draft_heads.mtp import MtpHead, load_mtp, read_mtp
from engine.model.draft_heads.published import HeadFormat, TargetShape
from engine.model.generation_config import max_positions
from engine.model.linear.packed_linear import Linear, linear_of
from protos.errors import ConfigError

Head = MedusaHeads | Eagle3Head | DFlashHead | MtpHead
_OF_LAYERS: dict[HeadKind, type[Eagle3Head] | type[DFlashHead]] = {
    HeadKind.EAGLE3: Eagle3Head,
    HeadKind.PEAGLE: ParallelEagleHead,
    HeadKind.DFLASH: DFlashHead,
    HeadKind.DSPARK: DFlashHead,
}


@dataclass(frozen=True, slots=True)
class HeadTarget:
    """The parts of a target that heads with files of their own are made for, on the heads' device.

    `quantization` is of the heads' layers. `outline` makes the target again without numbers.
    """

    shape: TargetShape
    embedding: Tensor  # [V, S]
    quantization: Quantization = Quantization.NONE
    outline: Callable[[], PreTrainedModel] | None = None

    @classmethod
    def of(cls, target: PreTrainedModel, device: torch.device, quantization: Quantization) -> HeadTarget:
        """Return the parts of `target` as loaded by transformers, with all layers."""
        embeddings: Any = target.get_input_embeddings()
        embedding: Tensor = embeddings.weight.to(device)
        text: Any = target.config.get_text_config()
        num_positions = max_positions(target.config) or 0
        shape = TargetShape(text.vocab_size, embedding.shape[1], text.num_hidden_layers, num_positions)
        return cls(shape, embedding, quantization, partial(_made_again, type(target), target.config))

    def load(self, kind: HeadKind, path: str) -> Head:
        """Return the head in the folder or Hub repository `path`.

        Raises:
            ConfigError: it does not exist, is incomplete, does not fit the target, or asks for lossy acceptance.
        """
        if kind is HeadKind.MEDUSA:
            return load_medusa(path, self.shape, self.embedding)
        folder = head_folder(path)
        if kind is HeadKind.MTP:
            assert self.outline is not None, "a loaded target has one"
            weights = Weights(read_tensors(folder), f"the mtp head in {path!r}")
            with understood(path):
                return read_mtp(read_config(folder), weights, self.outline, self.embedding, path)
        with understood(path):
            form = HeadFormat.of(kind, read_config(folder), self.shape, path)
        masks = {} if form.block is None else read_mask_embedding(folder, form.block.mask_id)
        weights = Weights(read_tensors(folder) | masks, f"the {kind} head in {path!r}")
        reader = HeadReader(form, weights, self.embedding, self.quantization)
        head = _OF_LAYERS[kind](form, reader)
        reader.finish()
        return head


def _made_again(model_class: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    return model_class(deepcopy(config))


def load_head(
    config: HeadConfig, target: PreTrainedModel, device: torch.device, quantization: Quantization = Quantization.NONE
) -> Head:
    """Return the head that `config` names for `target`. Raises ConfigError as `HeadTarget.load` does."""
    if config.kind is HeadKind.MTP and config.path is None:
        return load_mtp(target, device, config.num_layers)
    assert config.kind is not HeadKind.SELF, "the runner makes it of its own model"
    if config.path is None:
        raise ConfigError(f"draft.kind {str(config.kind)!r} needs draft.path, the head's folder or Hub id")
    return HeadTarget.of(target, device, quantization).load(config.kind, config.path)


def whole_lm_head(target: PreTrainedModel, device: torch.device) -> Linear:
    """Return the target's function from states to logits, on `device`, for a head of a sharded target."""
    head: Any = target.get_output_embeddings()
    return linear_of(head.weight.to(device), None if head.bias is None else head.bias.to(device))
