"""The target's own weights as its draft: in fewer bits (arXiv:2502.10424), or its first layers (arXiv:2404.16710).

Its keys and values are the target's, in the target's slots, so it needs no prefill and no cache. It computes from
the last committed token on. Nothing reads that slot or later ones yet: the pass that verifies its drafts rewrites
all of them, in every layer, before any row of that layer reads them. The same holds for the states of recurrent
layers: it starts from the target's state before that token, and leaves its own in slots that the pass rewrites.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.config import HeadConfig, Quantization
from engine.model.attention_probe import record_layers
from engine.model.decoders.families import FAMILIES, layers_of
from engine.model.decoders.fused_decoder import FusedDecoder
from engine.model.decoders.stock_decoder import StockDecoder, first_layers
from engine.model.forward_batch import ForwardBatch
from engine.model.linear.quantized_linear import check_can_quantize, linear_factory
from engine.model.linear.weight_store import NO_STORE, WeightStore
from engine.model.packed_decoder import packed_decoder, pooled_records
from engine.native.library import widened
from protos.errors import ConfigError


class SelfDraft:
    """A forward over the target's pool by the target's weights, quantized or cut as configured.

    Attributes:
        num_layers: how many of the target's it has.
        quantization: of its weights, `none` for the target's own.
        is_shared: its weights are the target's.
    """

    def __init__(
        self, config: HeadConfig, stock: PreTrainedModel, quantization: Quantization, dtype: torch.dtype
    ) -> None:
        """Keep the weights of `stock`, which the target's decoder takes away; rows are of `dtype`.

        Raises:
            ConfigError: the model has too few layers, or its device does not support the family or the quantization.
        """
        check_self(config, stock, quantization, stock.device)
        self.num_layers = config.num_layers or stock.config.get_text_config().num_hidden_layers
        self.quantization = Quantization(config.quantization)
        self._dtype = dtype
        self.is_shared = self.quantization in (Quantization.NONE, quantization)
        self._stock: Any = None if self.is_shared else _with_same_weights(stock)
        self._decoder: FusedDecoder | StockDecoder | None = None

    def begin(self, target: FusedDecoder | StockDecoder, store: WeightStore = NO_STORE) -> None:
        """Take the target's layers, or pack the weights again, kept in `store`; `target` is of the same model."""
        if self.is_shared:
            self._decoder = target.first(self.num_layers)
        else:
            self._decoder = self._packed(self._stock, store)
        self._stock = None

    def _packed(self, stock: Any, store: WeightStore) -> FusedDecoder | StockDecoder:
        num_layers, dtype = self.num_layers, self._dtype
        records = [each for each in pooled_records(stock, record_layers(stock).layers) if each.layer < num_layers]
        if num_layers < stock.config.get_text_config().num_hidden_layers:
            del layers_of(stock)[num_layers:]
        factories = linear_factory(self.quantization, dtype), linear_factory(self.quantization, dtype, is_head=True)
        return packed_decoder(stock, records, factories, dtype, store=store)[0]

    @torch.inference_mode()
    def logits(self, batch: ForwardBatch) -> Tensor:
        """Logits of the pass's rows, [R, V] float32; their slots hold KV that the target must write again."""
        assert self._decoder is not None, "begin comes first"
        return widened(self._decoder.logits(batch))


def _with_same_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of the modules that shares every tensor."""
    return copy.deepcopy(model, {id(each): each for each in (*model.parameters(), *model.buffers())})


def check_self(config: HeadConfig, target: PreTrainedModel, quantization: Quantization, device: torch.device) -> None:
    """Raise ConfigError if a target, quantized so, cannot draft for itself on `device`."""
    text = target.config.get_text_config()
    model_type, num_layers = text.model_type, text.num_hidden_layers
    types = [name for name, family in FAMILIES.items() if family.runs_anywhere]
    known = ", ".join(map(repr, types))
    if device.type != "cpu" and (model_type not in types or not FusedDecoder.fits_config(target.config)):
        raise ConfigError(
            f"draft.kind is 'self', which on {device.type!r} needs a model of type {known} that our own "
            f"decoder computes, but the target's is {model_type!r}; choose another draft.kind"
        )
    if config.num_layers is not None and config.num_layers >= num_layers:
        raise ConfigError(
            f"draft.num_layers is {config.num_layers}, but the target has {num_layers} layers; draft with fewer"
        )
    if config.num_layers is not None and not FusedDecoder.fits_config(target.config):
        first_layers(target, config.num_layers)
    is_packed_anew = config.quantization not in (Quantization.NONE, quantization)
    if config.num_layers is None and not is_packed_anew:
        raise ConfigError(
            f"draft.kind is 'self' and draft.quantization '{config.quantization}' gives it the target's own weights; "
            f"set draft.num_layers to less than {num_layers}, or another quantization"
        )
    if is_packed_anew:
        remedy = f"set it to 'none' and draft.num_layers to less than {num_layers}"
        check_can_quantize("draft.quantization", config.quantization, device, remedy)
