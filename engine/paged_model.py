"""Turns a stock transformers model into one whose attention reads a KV pool, and proves that the two agree.

Two short forwards decide whether a family can be served. The first records what each layer passes to its attention: a
layer that never calls our function, or calls it twice, keeps state that we do not page. The second computes tokens of
two sequences in flat passes, one of them in pieces, and compares the logits with the stock model's: a family that
ignores what a flat pass relies on (positions, keywords) cannot hide. Families are refused by model type, at start.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from engine.attention import ATTENTION_NAME, PASS_KEYWORD, AttentionPass, LayerOptions, UnsupportedAttention
from engine.flat_pass import FlatPass
from engine.kv_cache import KVCache, LayerShape
from engine.span import Span
from protos.errors import ConfigError

_PROBE_LENGTHS = (7, 5)
_PROBE_CHUNK = 4  # tokens of the first probe sequence that are computed in a pass before the others
_MAX_RELATIVE_ERROR = {torch.float32: 1e-3, torch.float16: 0.1, torch.bfloat16: 0.1}


class PagedModel:
    """A causal language model that computes flat passes.

    Attributes:
        vocab_size: columns of its logits.
        layer_shapes: the KV every layer keeps, first to last.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Switch `model` to paged attention, in place; ConfigError where its family does not go along."""
        self._model = model
        self._keeps_logit_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._stock_logits = _stock_logits(model)
        self.vocab_size = self._stock_logits.shape[-1]
        self.layer_shapes = _switch_attention(model)

    def new_cache(self, num_blocks: int, block_size: int) -> KVCache:
        return KVCache(self.layer_shapes, num_blocks, block_size, dtype=self._model.dtype, device=self._model.device)

    @torch.inference_mode()
    def forward(self, flat_pass: FlatPass) -> Tensor:
        """Logits of the pass's rows, [R, V] float32."""
        rows = flat_pass.logit_rows
        logits = self._call(flat_pass.input_ids, flat_pass.position_ids, rows, flat_pass.attention)
        return logits.float()

    def check_agreement(self, block_size: int) -> None:
        """Compute the probe sequences in pieces and mixed; ConfigError unless the logits are the stock model's.

        The median row decides: one token of a mixture of experts may go to another expert over a rounding.
        """
        blocks_each = -(-max(_PROBE_LENGTHS) // block_size)
        cache = self.new_cache(len(_PROBE_LENGTHS) * blocks_each, block_size)
        first, second = _probe_token_ids(self.vocab_size)
        tables = [range(index * blocks_each, (index + 1) * blocks_each) for index in range(2)]
        self.forward(FlatPass.of([Span(first[:_PROBE_CHUNK], 0, tables[0], 0)], cache))
        rest = first[_PROBE_CHUNK:]
        # No row's index in the pass is its position, so that a model which counts rows instead is wrong in all of them.
        spans = [Span(rest, _PROBE_CHUNK, tables[0], len(rest)), Span(second, 0, tables[1], len(second))]
        logits = self.forward(FlatPass.of(spans, cache))
        expected = self._stock_logits[_PROBE_CHUNK:]
        spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
        error = float(((logits - expected).norm(dim=-1) / spread).median())
        if not error <= _MAX_RELATIVE_ERROR[self._model.dtype]:
            raise _refusal(self._model, f"its logits in a flat pass differ from the stock model's by {error:.1%}")

    def _call(self, input_ids: Tensor, position_ids: Tensor, rows: Tensor | None, attention: AttentionPass) -> Tensor:
        keep = {"logits_to_keep": rows} if rows is not None and self._keeps_logit_rows else {}
        logits = self._model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, **keep, **{PASS_KEYWORD: attention}
        ).logits[0]
        return logits if rows is None or keep else logits[rows]


@dataclass(slots=True)
class _RecordingPass:
    """An `AttentionPass` that computes nothing and remembers what every layer passed to it."""

    shapes: list[tuple[int, LayerShape]] = field(default_factory=list)
    windows: dict[int, int | None] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        self.shapes.append((layer, LayerShape(key.shape[1], key.shape[3], value.shape[3])))
        self.windows[layer] = options.window
        return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def _probe_token_ids(vocab_size: int) -> tuple[list[int], list[int]]:
    ids = [(3 + 7 * index) % vocab_size for index in range(sum(_PROBE_LENGTHS))]
    return ids[: _PROBE_LENGTHS[0]], ids[_PROBE_LENGTHS[0] :]


@torch.inference_mode()
def _stock_logits(model: PreTrainedModel) -> Tensor:
    """Logits of the probe sequences, end to end, by the model as transformers has it; [sum of lengths, V] float32."""
    vocab_size = model.config.get_text_config().vocab_size
    sequences = (torch.tensor([ids], device=model.device) for ids in _probe_token_ids(vocab_size))
    return torch.cat([model(input_ids=ids, use_cache=False).logits[0].float() for ids in sequences])


@torch.inference_mode()
def _switch_attention(model: PreTrainedModel) -> list[LayerShape]:
    """Switch to our attention and return what KV each layer keeps."""
    recording = _RecordingPass()
    keywords = {PASS_KEYWORD: recording}
    positions = torch.arange(2, device=model.device)[None]
    try:
        model.set_attn_implementation(ATTENTION_NAME)
        model(input_ids=torch.zeros_like(positions), position_ids=positions, use_cache=False, **keywords)
    except (UnsupportedAttention, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise _refusal(model, str(error)) from error
    config = model.config.get_text_config()
    called = sorted(layer for layer, _ in recording.shapes)
    if called != list(range(config.num_hidden_layers)):
        num_layers = config.num_hidden_layers
        raise _refusal(model, f"{len(set(called))} of its {num_layers} layers call the attention function just once")
    _check_windows(model, recording, config)
    return [shape for _, shape in sorted(recording.shapes, key=lambda item: item[0])]


def _check_windows(model: PreTrainedModel, recording: _RecordingPass, config: PreTrainedConfig) -> None:
    """A family may keep its window in its mask alone, which we never see; its long contexts would come out wrong."""
    for layer, kind in enumerate(getattr(config, "layer_types", None) or []):
        if kind == "sliding_attention" and recording.windows[layer] is None:
            raise _refusal(model, f"layer {layer} has a sliding window that it does not pass to its attention function")


def _refusal(model: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(
        f"model type {model.config.model_type!r} cannot be served: {reason}; choose a family whose layers all use "
        "transformers' AttentionInterface (Llama, Qwen, Mistral, Gemma, Phi, GPT-2, OPT, Mixtral, gpt-oss and others)"
    )


def max_positions(config: PreTrainedConfig) -> int | None:
    """Positions a model may use without a token's law depending on its batch mates; None where nothing limits them.

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
