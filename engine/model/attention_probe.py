"""Probes the attention of each layer of a stock model: its KV, or a refusal if a paged pool cannot keep it.

Families are refused by name if they do not call the attention function, call it in some layers only (the others keep a
recurrent state), or call it twice. A family's masks show the tokens that each layer sees at every length. Windows are
read from them; any other mask is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from engine.attention.base import LayerOptions, UnsupportedAttentionError
from engine.attention.torch_attention import ATTENTION_NAME, PASS_KEYWORD, WINDOW_ATTRIBUTE, paged_attention
from engine.kv_cache.pool import LayerShape
from engine.model.checkpoint.reading_errors import READING_ERRORS
from engine.model.linear.packed_linear import weight_of
from engine.model.position_limit import max_positions
from protos.errors import ConfigError

_PROBE_NAME = "outrider_probe"
_NUM_TOKENS = 2
_MAX_LENGTH = 1 << 20  # longest text whose masks are checked


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


class _Masks:
    """The masks that a family makes in a forward, as functions of a query's place and a key's place.

    A layer gets a tensor filled with its mask's number.
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
    """Within it, plain linear layers return zeros and read no weight."""
    layers = [module for module in model.modules() if weight_of(module) is not None]
    for layer in layers:
        layer.forward = partial(_zeros, layer)  # shadows the class's until deleted
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _zeros(layer: nn.Module, x: Tensor) -> Tensor:
    weight = weight_of(layer)
    assert weight is not None, "`hollow` takes plain layers only"
    return x.new_zeros(*x.shape[:-1], weight.shape[0])


@torch.inference_mode()
def record_attention(model: PreTrainedModel) -> tuple[int, list[LayerRecord]]:
    """Switch `model` to our attention, run it on two tokens, and return the width of its logits and a record per layer.

    Weights of linear layers are not read: shapes, options and masks do not depend on them.

    Raises:
        ConfigError: the family cannot be served.
    """
    recording, windows = RecordingPass(), dict[int, int | None]()
    config = model.config.get_text_config()
    length = min(max(max_positions(model.config) or _MAX_LENGTH, _NUM_TOKENS), _MAX_LENGTH)
    keywords: Mapping[str, object] = {PASS_KEYWORD: recording}
    positions = torch.arange(_NUM_TOKENS, device=model.device)[None]
    _offer_probe(windows, length)
    with understood(model), hollow(model):
        model.set_attn_implementation(_PROBE_NAME)
        output = model(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False, **keywords)
        model.set_attn_implementation(ATTENTION_NAME)
    records = sorted(recording.records, key=lambda record: record.layer)
    if [record.layer for record in records] != list(range(config.num_hidden_layers)):
        num_layers = config.num_hidden_layers
        raise refusal(model, f"{len(records)} calls of the attention function came from its {num_layers} layers")
    _check_windows(model, records, windows)
    return output.logits.shape[-1], records


@contextmanager
def stock_attention(model: PreTrainedModel) -> Iterator[None]:
    """Within it, a model with our attention has transformers' own."""
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
    """Turn what transformers' modules raise in an unknown use into a refusal."""
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
