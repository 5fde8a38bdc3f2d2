"""A causal language model whose attention reads a KV pool, checked against the logits of its stock model.

The agreement check decides which models can be served. It computes two sequences in forward batches, one in pieces,
the other at the model's last positions, and compares the logits with the stock model's, whose linear layers multiply by
the same packed weights (each was compared with the plain product when it was packed). A family that ignores a part of
the forward batch (keywords, positions, hiding sequences from each other) fails, so no list of families is needed.
Windows are longer than these sequences; `engine.model.attention_probe` reads them from the masks.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from engine.attention.backend import is_batch_invariant
from engine.attention.base import PlanAttention
from engine.attention.native import NativeAttention
from engine.attention.torch_attention import TorchAttention
from engine.batch.indexing import Index, index_of
from engine.batch.span import Span, SpanStates
from engine.config import CacheConfig, KVDtype, Quantization
from engine.kv_cache.pool import KVCache, LayerShape, block_bytes
from engine.kv_cache.state_pool import StatePool, state_bytes
from engine.model.attention_probe import (
    LayerRecord,
    ModelRecord,
    kv_shapes_of,
    record_layers,
    refusal,
    stock_attention,
    understood,
)
from engine.model.checkpoint.node_memory import check_pool_memory
from engine.model.checkpoint.unread_weight import has_quantized
from engine.model.decoders.fused_decoder import FusedDecoder
from engine.model.decoders.latent import check_latents
from engine.model.decoders.stock_decoder import StockDecoder, counts_rows
from engine.model.determinism import first_difference, has_experts, obstacle
from engine.model.forward_batch import NO_TAPS, ForwardBatch, HiddenStateTaps
from engine.model.generation_config import max_positions
from engine.model.linear.packed_experts import packs_all_experts
from engine.model.linear.packed_linear import Linear, LinearFactory
from engine.model.linear.quantized_linear import dequantized, gpu_linear_factory, linear_factory, reads_few_bits
from engine.model.linear.weight_store import NO_STORE, WeightStore
from engine.model.loader import tokenizer_file
from engine.model.packed_decoder import packed_decoder, pooled_records
from engine.model.tensor_parallel import ALONE, Rank
from engine.native.library import processor_name, widened
from engine.sequence.sequence import ZEROS
from protos.errors import ConfigError
from protos.token_bytes import shared_tokenizer

_PROBE_LENGTHS = (7, 5)
_PROBE_BLOCK_SIZE = CacheConfig().block_size  # the default, so that a kernel compiled for the probe is reused
_PROBE_CHUNK = 4  # tokens of the first probe sequence in an earlier pass
# Of logits, after the roundings of all layers. Seen in bfloat16: 0.01 to 0.07, most of it the stock model's own.
_MAX_ERROR = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.15}
_PROBE_TEXT = "The quick brown fox jumps over the lazy dog; every model has read this sentence."


class PagedModel:
    """The forward of forward batches.

    Attributes:
        vocab_size: columns of the logits.
        layer_shapes: the KV of every layer, first to last, on all ranks together.
        decoder: the forward of this rank.
        state_shapes: the states of recurrent layers, first to last.
        rank_shapes: the KV of this rank: its heads, or all heads in families whose attention is not sharded.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        quantization: Quantization = Quantization.NONE,
        plan_attention: PlanAttention = TorchAttention,
        taps: HiddenStateTaps = NO_TAPS,
        rank: Rank = ALONE,
        *,
        dtype: torch.dtype | None = None,
        is_deterministic: bool = False,
        store: WeightStore = NO_STORE,
    ) -> None:
        """Make `model` paged in place and quantise its linear layers; it has no other use afterwards.

        With several ranks, all construct theirs at the same time and call `forward` together.

        Args:
            model: transformers' own, with stock attention.
            quantization: of the linear layers.
            plan_attention: the attention of forwards; batch-invariant if `is_deterministic`.
            taps: hidden states that forwards keep as `features`.
            rank: this process among the model's ranks.
            dtype: of hidden states and KV; None for the model's. Weights may be stored in another.
            is_deterministic: a row's logits have the same bits in every batch.
            store: keeps the packed weights of a model on one rank, and that it agreed with its stock model.

        Raises:
            ConfigError: the model's family cannot be served.
        """
        probe, stock, whole_logits = _probe_whole(model, quantization, rank)
        self.vocab_size, self.state_shapes, self._model_type = stock.vocab_size, stock.states, model.config.model_type
        records = pooled_records(model, stock.layers, rank)
        self.layer_shapes = self.rank_shapes = kv_shapes_of(records)
        self._dtype, self._device = dtype or model.dtype, rank.device or model.device
        self._padding_ids: Index | None = None
        self._plan_attention = plan_attention
        if is_deterministic:
            has_kernel = is_batch_invariant(plan_attention) or self._is_native()
            _refuse_companions(model, records, rank, linear_factory(quantization, self._dtype), has_kernel=has_kernel)
        factories = _factories(model, quantization, self._dtype, is_deterministic=is_deterministic)
        self.decoder, self.rank_shapes = packed_decoder(
            model, records, factories, self._dtype, taps, rank, is_deterministic=is_deterministic, store=store
        )
        note = _circumstances(plan_attention, self.decoder, is_deterministic=is_deterministic)
        if store.has_agreed(note):
            return
        self._check_agreement(model, probe, rank, whole_logits, quantization)
        if is_deterministic and (difference := self._first_difference()):
            raise _not_deterministic(model, f"{difference} gives the same tokens other logits than a prefill")
        store.agree(note)

    def _check_agreement(
        self,
        model: PreTrainedModel,
        probe: _Probe,
        rank: Rank,
        expected: Tensor | None,
        quantization: Quantization,
    ) -> None:
        """Compare the probe's logits with the stock model's of the same weights; other ranks compute only.

        Raises:
            ConfigError: they differ, or change with other tokens in the pass.
        """
        (first, second), far = probe
        if rank.size == 1:
            with understood(model), stock_attention(model):
                expected = _stock_logits(model, *probe)
        with understood(model):
            logits = self._probed((first, second), far)
            leaked = self._probed((_others(first, self.vocab_size), second), far)
        if expected is None:
            return
        tolerance = _MAX_ERROR[self._dtype] + 0.2 * (quantization is not Quantization.NONE)
        num_own = len(second)
        parts = (slice(None, -num_own), slice(-num_own, None))
        error = max(_relative_error(logits[rows], expected[rows]) for rows in parts)
        if not error <= tolerance:
            raise refusal(model, f"its logits in a forward batch differ from the stock model's by {error:.1%}")
        if _is_leaking(model, leaked[-num_own:], logits[-num_own:]):
            raise refusal(model, "other sequences in a forward batch change its logits")

    @property
    def features(self) -> Tensor | None:
        """Hidden states of the last pass, [T, F]; None without taps. Valid until the next forward."""
        return self.decoder.features

    @property
    def lm_head(self) -> Linear:
        """Linear function from the states after the final norm to logits."""
        return self.decoder.lm_head

    def new_cache(
        self,
        num_blocks: int,
        block_size: int,
        more_layers: Seq[LayerShape] = (),
        kind: KVDtype = KVDtype.AUTO,
        num_states: int = 0,
    ) -> KVCache:
        """Return a pool for this rank's heads of the model's layers and of `more_layers` after them.

        It has `num_states` slots for the states of recurrent layers, if the model has any.

        Raises:
            ConfigError: this node has too little memory for the full pool, or a pool of `kind` cannot keep a layer.
        """
        shapes = [*self.rank_shapes, *more_layers]
        if any(shape.is_latent for shape in shapes):
            check_latents(kind, self._plan_attention, self._model_type)
        if self._device.type == "cpu":
            needed = num_states * state_bytes(self.state_shapes, self._dtype)
            check_pool_memory(num_blocks * block_bytes(shapes, block_size, self._dtype, kind) + needed)
        dtype, device, states = self._dtype, self._device, None
        if self.state_shapes:
            states = StatePool(self.state_shapes, num_states, dtype=dtype, device=device)
        return KVCache(shapes, num_blocks, block_size, dtype=dtype, device=device, kind=kind, states=states)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, out: Tensor | None = None) -> Tensor:
        """Return the logits of the pass's rows, [R, V] float32, in `out` if given; write their KV to its slots."""
        logits = self.decoder.logits(batch)
        logits = widened(logits) if out is None else out.copy_(logits)
        if self._padding_ids is not None:
            logits[:, self._padding_ids] = float("-inf")
        return logits

    def mask(self, token_ids: Seq[int]) -> None:
        """Mask these tokens from now on: rows of the head without a token in the tokenizer."""
        if token_ids:
            self._padding_ids = index_of(token_ids, self._device)

    def _probed(self, sequences: tuple[list[int], list[int]], far: int) -> Tensor:
        """Return the logits of both sequences after the first chunk, end to end, computed in pieces and together.

        The second sequence's tokens have positions from `far` on.
        """
        cache = self.new_cache(num_blocks=2, block_size=_PROBE_BLOCK_SIZE, num_states=3)
        first, second = sequences
        kept = SpanStates(ZEROS, {_PROBE_CHUNK: 1})
        self.forward(ForwardBatch.of([Span(first[:_PROBE_CHUNK], 0, [0], 0, states=kept)], cache, self._plan_attention))
        rest = first[_PROBE_CHUNK:]
        # No row's index in the pass is its position, so a model that counts rows is wrong in all of them.
        states = [SpanStates(1, {}), SpanStates(ZEROS, {len(second): 2})]
        spans = [
            Span(rest, _PROBE_CHUNK, [0], len(rest), states=states[0]),
            Span(second, 0, [1], len(second), states=states[1]),
        ]
        batch = ForwardBatch.of(spans, cache, self._plan_attention)
        batch.position_ids[len(rest) :] += far
        return self.forward(replace(batch, num_positions=max(batch.num_positions, far + len(second)))).clone()

    def _is_native(self) -> bool:
        cache = self.new_cache(1, _PROBE_BLOCK_SIZE, num_states=1)
        return isinstance(self._plan_attention([Span([0], 0, [0], 1)], cache, slice(0, 1)), NativeAttention)

    def _first_difference(self) -> str | None:
        cache = self.new_cache(num_blocks=3, block_size=32, num_states=3 * 32 + 2)

        def forward(spans: list[Span]) -> Tensor:
            return self.forward(ForwardBatch.of(list(map(_with_states, spans)), cache, self._plan_attention))

        return first_difference(forward, self.vocab_size)


def _refuse_companions(
    model: PreTrainedModel, records: Seq[LayerRecord], rank: Rank, make_linear: LinearFactory, *, has_kernel: bool
) -> None:
    """Raise ConfigError if a row of a deterministic model would depend on the rows next to it."""
    fits = FusedDecoder.fits(model, rank)
    packs = rank.size == 1 and packs_all_experts(model, make_linear)
    if reason := obstacle(model, records, has_own_kernel=has_kernel, has_own_decoder=fits, has_own_experts=packs):
        raise _not_deterministic(model, reason)


def _with_states(span: Span) -> Span:
    """Return the span of a probe with a slot for the state after each token; each sequence has one block of 32."""
    first = 32 * span.block_table[0] + 1
    after = {count: first + span.start + count for count in range(1, len(span.token_ids) + 1)}
    return span._replace(states=SpanStates(first + span.start if span.start else ZEROS, after))


def _factories(
    model: PreTrainedModel, quantization: Quantization, dtype: torch.dtype, *, is_deterministic: bool
) -> tuple[LinearFactory, LinearFactory]:
    """Return the functions that pack the products of `model`, and of its head."""
    is_on_gpu = model.device.type == "cuda" or reads_few_bits(model.device)
    make = linear_factory
    if is_on_gpu and (is_deterministic or quantization is not Quantization.NONE or has_quantized(model)):
        make = partial(gpu_linear_factory, is_deterministic=is_deterministic)
    return make(quantization, dtype), make(quantization, dtype, is_head=True)


def _circumstances(
    plan_attention: PlanAttention, decoder: FusedDecoder | StockDecoder, *, is_deterministic: bool
) -> str:
    """Name everything that the agreement depends on, except the weights, our code and kernels."""
    attention = getattr(plan_attention, "__qualname__", repr(type(plan_attention)))
    threads = torch.get_num_threads()
    return f"{type(decoder).__name__} {attention} {processor_name()} {threads} threads {is_deterministic=}"


def _not_deterministic(model: PreTrainedModel, reason: str) -> ConfigError:
    return ConfigError(
        f"target.deterministic is true, but model type {model.config.model_type!r} cannot be deterministic here: "
        f"{reason}; set it to false"
    )


_Probe = tuple[tuple[list[int], list[int]], int]  # two sequences, and the position where the second starts


def _probe_whole(
    model: PreTrainedModel, quantization: Quantization, rank: Rank
) -> tuple[_Probe, ModelRecord, Tensor | None]:
    """Return the probe, the record of all layers, and the stock logits if the weights are about to be sharded."""
    stock, logits = None, None
    with understood(model):
        probe = _probe_token_ids(model), _far_position(model)
    if rank.is_first:  # other ranks read only their part of the weights, from a mapped file
        if rank.size > 1:  # the weights are still whole
            with understood(model), dequantized(model, quantization):
                logits = _stock_logits(model, *probe)
        stock = record_layers(model)
    rank.barrier()
    return probe, rank.from_first(stock), logits


@torch.inference_mode()
def _stock_logits(model: PreTrainedModel, sequences: tuple[list[int], list[int]], far: int) -> Tensor:
    """Return the logits of both sequences after the first chunk; the second starts at position `far`.

    Raises:
        ConfigError: the model's default positions do not start at 0.
    """

    def logits(token_ids: list[int], **positions: Tensor) -> Tensor:
        inputs = torch.tensor([token_ids], device=model.device)
        return cast(Tensor, model(input_ids=inputs, use_cache=False, **positions).logits[0].float())

    def positions(start: int, length: int) -> Tensor:
        return torch.arange(start, start + length, device=model.device)[None]

    first, second = sequences
    near = logits(first)
    if _is_leaking(model, logits(first, position_ids=positions(0, len(first))), near):
        raise refusal(model, "it does not count the positions of a text from 0")
    return torch.cat((near[_PROBE_CHUNK:], logits(second, position_ids=positions(far, len(second)))))


def _relative_error(logits: Tensor, expected: Tensor) -> float:
    """Return the distance of logits from the expected ones, relative to their spread.

    The median row decides, since a rounding may send a token of a mixture of experts to another expert.
    """
    return float(_row_errors(logits, expected).median())


def _is_leaking(model: PreTrainedModel, logits: Tensor, expected: Tensor) -> bool:
    """True if other tokens changed logits beyond the roundings of experts."""
    errors = _row_errors(logits, expected)
    if has_experts(model):
        return not float(errors.median()) <= 0.01  # mixtures of experts group other rows then
    return not float(errors.max()) <= 1e-6  # change of logits by other tokens in the pass


def _row_errors(logits: Tensor, expected: Tensor) -> Tensor:
    expected = expected.to(logits.device)
    spread = (expected - expected.mean(dim=-1, keepdim=True)).norm(dim=-1)
    errors: Tensor = (logits - expected).norm(dim=-1) / spread
    return errors


def _far_position(model: PreTrainedModel) -> int:
    """Return the first position of the probe's second sequence, which ends at the model's last position.

    A model that counts rows agrees with itself only at the start of a sequence.
    """
    if counts_rows(model):
        return 0
    limit = max_positions(model.config) or 1 << 17
    return max(0, min(limit, 4096 if FusedDecoder.fits(model) else limit) - _PROBE_LENGTHS[1])


def _others(token_ids: list[int], vocab_size: int) -> list[int]:
    return [(token_id + 1) % vocab_size for token_id in token_ids]


def _probe_token_ids(model: PreTrainedModel) -> tuple[list[int], list[int]]:
    """Return two sequences of token ids: of a text if the model has a tokenizer, since random ids are unnatural."""
    num_tokens, vocab_size = sum(_PROBE_LENGTHS), model.config.get_text_config().vocab_size
    file = tokenizer_file(model.name_or_path) if model.name_or_path else None
    ids = shared_tokenizer(file).encode(_PROBE_TEXT).ids[:num_tokens] if file else []
    if len(ids) < num_tokens or max(ids) >= vocab_size:
        ids = [(3 + 7 * index) % vocab_size for index in range(num_tokens)]
    return ids[: _PROBE_LENGTHS[0]], ids[_PROBE_LENGTHS[0] :]
