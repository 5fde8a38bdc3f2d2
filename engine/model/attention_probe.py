"""Probes the attention of each layer of a stock model: its KV, or a refusal if a paged pool cannot keep it.

Families are refused by name if a layer neither calls the attention function once nor keeps a recurrent state of a kind
that `engine.recurrent` knows. A family's masks show the tokens that each layer sees at every length. Windows are
read from them; any other mask is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from engine.attention.base import LayerOptions, UnsupportedAttentionError
from engine.attention.torch_attention import (
    ATTENTION_NAME,
    LAYER_ATTRIBUTE,
    WINDOW_ATTRIBUTE,
    attending,
    paged_attention,
)
from engine.kv_cache.pool import LayerShape
from engine.kv_cache.state_pool import StateShape
from engine.model.checkpoint.completeness import READING_ERRORS
from engine.model.generation_config import max_positions
from engine.model.linear.packed_experts import experts_of
from engine.model.linear.packed_linear import weight_of
from engine.recurrent.state_pass import RecordingStates
from engine.recurrent.stock_functions import STATE_KEYWORD, StatePass, connect
from protos.errors import ConfigError

_PROBE_NAME = "outrider_probe"
_STATELESS = ("mlp", "moe")  # kinds of layers that keep nothing of a text


@dataclass(frozen=True, slots=True)
class LayerRecord:
    """One layer's attention, over keys and values that layer `source` stores: itself, or an earlier one."""

    layer: int
    shape: LayerShape
    options: LayerOptions
    source: int

    @property
    def stores_kv(self) -> bool:
        """True if its keys and values are its own."""
        return self.source == self.layer


@dataclass(slots=True)
class RecordingPass:
    """An `AttentionPass` that computes nothing and records the call of every layer."""

    records: list[LayerRecord] = field(default_factory=list)
    _keys: list[Tensor] = field(default_factory=list)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        shape = LayerShape(num_kv_heads=key.shape[1], key_dim=key.shape[3], value_dim=value.shape[3])
        pairs = zip(self.records, self._keys, strict=True)
        source = next((record.layer for record, seen in pairs if seen is key), layer)
        self.records.append(LayerRecord(layer, shape, options, source))
        self._keys.append(key)
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


class _Masks:
    """Collects the mask functions of a family, which take a query's place and a key's place.

    In place of a mask, a layer gets a tensor filled with its function's number.
    """

    def __init__(self) -> None:
        self._functions: list[Callable[..., Tensor]] = []
        self._windows: dict[tuple[int, int], int | None] = {}

    def make(self, *, batch_size: int, q_length: int, kv_length: int, mask_function: Any, **_: object) -> Tensor:
        """Replaces transformers' mask functions."""
        self._functions.append(mask_function)
        return torch.full((batch_size, 1, q_length, kv_length), float(len(self._functions)))

    def window(self, mask: Tensor, length: int) -> int | None:
        """Return the number of tokens that a row sees, itself included, in a text of `length`; None if all before it.

        Raises:
            UnsupportedAttentionError: the mask was not made here, or is not a window.
        """
        number = int(mask.flatten()[0])
        if not 0 < number <= len(self._functions) or not bool((mask == number).all()):
            raise UnsupportedAttentionError("its attention adds a bias or a mask of its own")
        if (number, length) not in self._windows:
            self._windows[number, length] = _window(self._functions[number - 1], length)
        return self._windows[number, length]


def _window(visible: Callable[..., Tensor], length: int) -> int | None:
    keys, zero = torch.arange(length), torch.tensor(0)

    def row(query: int) -> Tensor:
        return torch.as_tensor(visible(zero, zero, torch.tensor(query), keys)).expand(length)

    last = row(length - 1)
    first = int(last.int().argmax())
    window = length - first
    for query in {0, 1, length // 2, length - 1, window - 1, window, 2 * window} & set(range(length)):
        if not torch.equal(row(query), (keys <= query) & (keys > query - window)):
            raise UnsupportedAttentionError(
                "its attention hides tokens other than those after a row and before a window"
            )
    return window if first else None


@contextmanager
def hollow(model: nn.Module) -> Iterator[None]:
    """In this block, plain linear layers and experts return zeros and read no weight."""
    layers = [module for module in model.modules() if weight_of(module) is not None]
    experts = [module for _, module in experts_of(model)]
    for layer in layers:
        layer.forward = partial(_zeros, layer)  # shadows the class's until deleted
    for module in experts:
        module.forward = _no_experts
    try:
        yield
    finally:
        for module in (*layers, *experts):
            del module.forward


def _zeros(layer: nn.Module, x: Tensor) -> Tensor:
    weight = weight_of(layer)
    assert weight is not None, "`hollow` takes plain layers only"
    return x.new_zeros(*x.shape[:-1], weight.shape[0])


def _no_experts(hidden_states: Tensor, *routing: Tensor) -> Tensor:
    return torch.zeros_like(hidden_states)


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The width of a model's logits, its layers with attention, and the states of its recurrent layers."""

    vocab_size: int
    layers: list[LayerRecord]
    states: list[StateShape]


@torch.inference_mode()
def record_layers(model: PreTrainedModel) -> ModelRecord:
    """Switch `model` to our attention and our recurrent layers, run it on two tokens, and return what its layers keep.

    Weights of linear layers are not read: shapes, options and masks do not depend on them.

    Raises:
        ConfigError: the family cannot be served.
    """
    recording, states, windows = RecordingPass(), RecordingStates(), dict[int, int | None]()
    recurrent = connect(model)
    _number(model, {})
    num_tokens = 2
    longest = 1 << 20  # of the texts whose masks are checked
    length = min(max(max_positions(model.config) or longest, num_tokens), longest)
    positions = torch.arange(num_tokens, device=model.device)[None]
    _offer_probe(windows, length)
    with understood(model), hollow(model), attending(recording):
        model.set_attn_implementation(_PROBE_NAME)
        output = model(
            input_ids=torch.zeros_like(positions),
            position_ids=positions,
            use_cache=False,
            **state_keywords(states if recurrent else None),
        )
        model.set_attn_implementation(ATTENTION_NAME)
    records = sorted(recording.records, key=lambda record: record.layer)
    check_layers(model, [record.layer for record in records], recurrent if states.are_complete(recurrent) else [])
    _check_windows(model, records, windows)
    kv_layers = kv_layers_of(records)
    _number(model, {record.layer: index for record, index in zip(records, kv_layers, strict=True)})
    return ModelRecord(output.logits.shape[-1], records, states.shapes)


def state_keywords(states: StatePass | None) -> Mapping[str, object]:
    """Return the keywords of a forward with our recurrent layers, where a model has any."""
    return {} if states is None else {STATE_KEYWORD: states}


def kv_layers_of(records: Seq[LayerRecord]) -> list[int]:
    """Return the index in the pool of each layer's keys and values."""
    stored = [record.layer for record in records if record.stores_kv]
    return [stored.index(record.source) for record in records]


def kv_shapes_of(records: Seq[LayerRecord]) -> list[LayerShape]:
    """Return the shapes of the keys and values that layers store, first to last."""
    return [record.shape for record in records if record.stores_kv]


def check_layers(model: PreTrainedModel, with_attention: list[int], recurrent: list[int]) -> None:
    """Refuse a model with a layer whose memory of a text we do not keep.

    Args:
        model: the model.
        with_attention: the layer of each call of our attention.
        recurrent: the layers whose states we keep.
    """
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or []
    without = {layer for layer, kind in enumerate(kinds) if kind in _STATELESS}
    num_calls, num_layers = len(with_attention), config.num_hidden_layers
    is_once = num_calls == len({*with_attention})
    if not is_once or {*with_attention, *recurrent} != {*range(num_layers)} - without | {*recurrent}:
        raise refusal(model, f"{num_calls} calls of the attention function came from its {num_layers} layers")


def _number(model: PreTrainedModel, kv_layers: Mapping[int, int]) -> None:
    """Give the layers with attention their indices in the pool; the others, and all of an earlier count, have none."""
    for module in model.modules():
        layer: Any = getattr(module, "layer_idx", None)
        if layer in kv_layers:
            setattr(module, LAYER_ATTRIBUTE, kv_layers[layer])
        elif hasattr(module, LAYER_ATTRIBUTE):
            delattr(module, LAYER_ATTRIBUTE)


@contextmanager
def stock_attention(model: PreTrainedModel) -> Iterator[None]:
    """In this block, a model with our attention uses transformers' own."""
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _offer_probe(windows: dict[int, int | None], length: int) -> None:
    """Register the probe's attention with transformers; `windows` collects the window of each layer with a mask."""
    masks = _Masks()

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, None]:
        if attention_mask is not None:
            window = windows[module.layer_idx] = masks.window(attention_mask, length)
            if window is not None or (options.get("sliding_window") or length) < length:
                options["sliding_window"] = window
        return paged_attention(module, query, key, value, None, **options)

    AttentionInterface.register(_PROBE_NAME, attend)
    AttentionMaskInterface.register(_PROBE_NAME, masks.make)


def set_windows(model: PreTrainedModel, records: Iterable[LayerRecord]) -> None:
    """Make the layers of `model` attend within the windows of `records`, even if they pass no window or another."""
    windows = {record.layer: record.options.window for record in records}
    for module in model.modules():
        if (layer := getattr(module, "layer_idx", None)) in windows:
            setattr(module, WINDOW_ATTRIBUTE, windows[layer])


@contextmanager
def understood(model: PreTrainedModel) -> Iterator[None]:
    """Turn errors of transformers' modules into a refusal of the family."""
    try:
        yield
    except UnsupportedAttentionError as error:
        raise refusal(model, str(error)) from error
    except torch.OutOfMemoryError:
        raise
    except READING_ERRORS as error:
        raise refusal(model, f"its modules fail, {type(error).__name__}: {error}") from error


def refusal(model: PreTrainedModel, reason: str) -> ConfigError:
    """Return the error for a family that cannot be served, with its remedy."""
    return ConfigError(
        f"model type {model.config.model_type!r} cannot be served: {reason}; choose a family whose layers all use "
        "transformers' AttentionInterface (Llama, Qwen, Mistral, Gemma, Phi, GPT-2, OPT, Mixtral, gpt-oss and others)"
    )


def _check_windows(model: PreTrainedModel, records: list[LayerRecord], windows: Mapping[int, int | None]) -> None:
    """Refuse a layer whose window is not visible in a mask, since its long contexts would be wrong."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None) or []
    for record, kind in zip(records, kinds, strict=False):
        if kind == "sliding_attention" and record.options.window is None and record.layer not in windows:
            raise refusal(model, f"layer {record.layer} has a sliding window that it does not pass to its attention")
