"""Models of any family, through transformers' own modules with our attention and packed weights inside."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.attention.torch_attention import attending
from engine.model.attention_probe import refusal
from engine.model.forward_batch import NO_TAPS, ForwardBatch, HiddenStateTaps, joined
from engine.model.linear.packed_linear import Linear
from engine.recurrent.mixer import are_recordable
from engine.recurrent.stock_functions import STATE_KEYWORD
from protos.errors import ConfigError

_ROW_COUNTER = "attn_temperature_tuning"  # of Llama 4's layers, which scale a query by its row and a cache's length
_FINAL = -1  # index of the states after the final norm


def counts_rows(model: PreTrainedModel) -> bool:
    """True for a model that takes a row's index in the pass, plus the length of its cache, for a position."""
    return any(getattr(module, _ROW_COUNTER, None) for module in model.modules())


def first_layers(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """Return a model of the first `num_layers` layers of `model`, with the same norm and head; both share all modules.

    Raises:
        ConfigError: the family does not show its layers.
    """
    trunk = model.get_decoder()
    name = next((name for name, module in model.named_children() if module is trunk), None)
    layers = getattr(trunk, "layers", None)
    if name is None or not isinstance(layers, nn.ModuleList):
        raise ConfigError(
            f"draft.num_layers is {num_layers}, but model type {model.config.model_type!r} does not show its layers; "
            "remove it, and set draft.quantization to int4 or int8"
        )
    first, cut = _twin(model), _twin(trunk)
    cut.layers = layers[:num_layers]
    setattr(first, name, cut)
    return first


def _twin(module: Any) -> Any:
    """Return another module with the same parts, which may be exchanged."""
    twin = copy.copy(module)
    vars(twin)["_modules"] = dict(module._modules)
    return twin


class _RowPositions:
    """Stands in for transformers' cache, in layers that take a row's index plus the cache's length for its position."""

    def __init__(self, position_ids: Tensor) -> None:
        self._lengths = position_ids - torch.arange(len(position_ids), device=position_ids.device)

    def get_seq_length(self, layer: int = 0) -> Tensor:
        return self._lengths

    def update(self, keys: Tensor, values: Tensor, *_: object) -> tuple[Tensor, Tensor]:
        return keys, values


class StockDecoder:
    """The forward of one model.

    Attributes:
        features: what `taps` asks for of the last pass, [T, F].
    """

    def __init__(self, model: PreTrainedModel, taps: HiddenStateTaps = NO_TAPS) -> None:
        """Raises ConfigError if the family does not show the states that `taps` asks for."""
        self.features: Tensor | None = None
        self._model = model
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._taps = taps
        self._tapped: dict[int, Tensor] = {}
        self._counts_rows = counts_rows(model)
        if taps:
            self._hook()

    def first(self, num_layers: int) -> StockDecoder:
        """Return a decoder of the first `num_layers` layers and the same norm and head; it shares all weights.

        Raises:
            ConfigError: the family does not show its layers.
        """
        return StockDecoder(first_layers(self._model, num_layers))

    @property
    def lm_head(self) -> Linear:
        """From the states after the final norm to logits."""
        return cast(Linear, self._model.get_output_embeddings())

    @property
    def is_recordable(self) -> bool:
        """True if passes can be recorded as far as recurrent layers are concerned."""
        return are_recordable(self._model)

    def logits(self, batch: ForwardBatch) -> Tensor:
        """Logits of the pass's rows, [R, V]."""
        rows = batch.logit_rows
        keywords: dict[str, Any] = {} if batch.states is None else {STATE_KEYWORD: batch.states}
        if rows is not None and self._keeps_rows:
            keywords["logits_to_keep"] = rows
        if self._counts_rows:
            keywords["past_key_values"] = _RowPositions(batch.position_ids)
        rows_of_pass = {"input_ids": batch.input_ids[None], "position_ids": batch.position_ids[None]}
        with attending(batch.attention):
            logits: Tensor = self._model(**rows_of_pass, use_cache=False, **keywords).logits[0]
        self.features = joined([self._tapped[layer] for layer in self._tapped_layers])
        return logits if rows is None or self._keeps_rows else logits[rows]

    @property
    def _tapped_layers(self) -> tuple[int, ...]:
        return (*self._taps.layers, *((_FINAL,) if self._taps.is_final else ()))

    def _hook(self) -> None:
        decoder = self._model.get_decoder()
        layers = getattr(decoder, "layers", None)
        for layer in self._taps.layers:
            if not isinstance(layers, nn.ModuleList):
                raise refusal(self._model, "its layers cannot be tapped for a head")
            if layer < len(layers):
                layers[layer].register_forward_pre_hook(partial(self._see_input, layer), with_kwargs=True)
            else:
                layers[-1].register_forward_hook(partial(self._see_output, layer))
        if self._taps.is_final:
            decoder.register_forward_hook(partial(self._see_output, _FINAL))

    def _see_input(self, layer: int, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        self._tapped[layer] = (inputs[0] if inputs else keywords["hidden_states"])[0]

    def _see_output(self, layer: int, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        self._tapped[layer] = (output if isinstance(output, Tensor) else output[0])[0]
