"""Paged attention for transformers' AttentionInterface: write a pass's new KV, then attend to the keys a row sees.

Every layer of a model calls `paged_attention`, which hands the work to the `AttentionPass` of the forward around it
(`attending`). The code is plain torch and runs on any device; it is shaped for the processor: the query
heads of a kv head are folded into rows of one matrix product ("packed"), so that keys are read once and never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from engine.attention.base import AttentionPass, LayerOptions, UnsupportedAttentionError
from engine.attention.read_plan import KVRead, ReadPlan
from engine.batch.indexing import Index
from engine.batch.span import Span
from engine.kv_cache.pool import KVCache

ATTENTION_NAME = "outrider_paged"
LAYER_ATTRIBUTE = "outrider_layer"  # of a module: its layer's index in the pool
WINDOW_ATTRIBUTE = "outrider_window"  # of a module: the window of its mask, preferred to the one it passes
_pass: ContextVar[AttentionPass | None] = ContextVar("attention_pass", default=None)


@contextmanager
def attending(attention: AttentionPass) -> Iterator[None]:
    """In this block, the layers of this thread's forward use `attention`."""
    token = _pass.set(attention)
    try:
        yield
    finally:
        _pass.reset(token)


def paged_attention(  # the signature of transformers' AttentionInterface
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Compute a layer's attention: the function that every attention layer calls."""
    attention_pass = _pass.get()
    assert attention_pass is not None, "a forward with our attention is within `attending`"
    if position_bias is not None or attention_mask is not None:
        raise UnsupportedAttentionError("its attention adds a bias or a mask of its own")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = LayerOptions(scaling, getattr(module, WINDOW_ATTRIBUTE, sliding_window), softcap, s_aux)
    # In one piece, as transformers' own functions return it: some families take a view of it.
    layer = getattr(module, LAYER_ATTRIBUTE, module.layer_idx)
    return attention_pass.attend(layer, query, key, value, options).contiguous(), None


AttentionInterface.register(ATTENTION_NAME, paged_attention)


class TorchAttention:
    """The `engine.attention.base.AttentionPass` of any device; reads are planned once per distinct window."""

    def __init__(self, spans: Seq[Span], cache: KVCache, slots: Index) -> None:
        self._cache = cache
        self._slots = slots
        self._plan = ReadPlan(spans, cache)
        self._reads: dict[int | None, list[KVRead]] = {}
        self._packed_masks: dict[tuple[int, int], Tensor | None] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        self._cache.write(layer, self._slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        reads = self._reads.get(options.window)
        if reads is None:
            reads = self._reads[options.window] = self._plan.reads(options.window)
        if len(reads) == 1 and isinstance(reads[0].rows, slice):
            return self._read(layer, reads[0], query, options)
        out = query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1])
        for read in reads:
            result = self._read(layer, read, query, options)[0]
            if isinstance(read.rows, slice):
                out[0, read.rows] = result
            else:
                out[0].index_copy_(0, read.rows, result)
        return out

    def _read(self, layer: int, read: KVRead, query: Tensor, options: LayerOptions) -> Tensor:
        """Attention of the read's rows over its keys, [1, B * Q, H * G, D]."""
        rows = query[:, :, read.rows] if isinstance(read.rows, slice) else query.index_select(2, read.rows)
        keys, values = (_by_span(blocks, read) for blocks in self._cache.read_blocks(layer, read.blocks))
        num_kv_heads = keys.shape[1]
        group_size = query.shape[1] // num_kv_heads
        if read.is_packed:
            q = _fold(rows, read, num_kv_heads, group_size)  # [B, H, G * Q, D]
            out = _attend(q, keys, values, self._packed_mask(read, group_size), options, group_size)
            return _unfold(out, read, group_size)
        if group_size > 1:
            keys, values = (_repeat_heads(tensor, group_size) for tensor in (keys, values))
        out = _attend(rows, keys, values, read.mask, options, 1, is_causal=read.is_causal)
        return out.transpose(1, 2)

    def _packed_mask(self, read: KVRead, group_size: int) -> Tensor | None:
        """The read's mask with its rows repeated for each folded head, [B, 1, G * Q, S]."""
        if read.mask is None or group_size == 1 or read.num_rows == 1:
            return read.mask  # a single row broadcasts
        mask = self._packed_masks.get((id(read), group_size))
        if mask is None:
            mask = read.mask.repeat(1, 1, group_size, 1)
            self._packed_masks[id(read), group_size] = mask
        return mask


def _by_span(blocks: Tensor, read: KVRead) -> Tensor:
    """Return the read's keys (or values) [B * M, P, H, D] as [B, H, S, D]."""
    by_span = blocks.view(read.num_spans, -1, *blocks.shape[2:])  # [B, M * P, H, D]
    return by_span[:, : read.num_keys].transpose(1, 2)


def _fold(rows: Tensor, read: KVRead, num_kv_heads: int, group_size: int) -> Tensor:
    """[1, H * G, B * Q, D] -> [B, H, G * Q, D]."""
    split = rows.view(num_kv_heads, group_size, read.num_spans, read.num_rows, -1)
    return split.permute(2, 0, 1, 3, 4).reshape(read.num_spans, num_kv_heads, group_size * read.num_rows, -1)


def _unfold(out: Tensor, read: KVRead, group_size: int) -> Tensor:
    """[B, H, G * Q, D] -> [1, B * Q, H * G, D]."""
    num_spans, num_kv_heads, _, dim = out.shape
    split = out.view(num_spans, num_kv_heads, group_size, read.num_rows, dim)
    return split.permute(0, 3, 1, 2, 4).reshape(1, num_spans * read.num_rows, num_kv_heads * group_size, dim)


def _repeat_heads(keys: Tensor, group_size: int) -> Tensor:
    """[B, H, S, D] -> [B, H * G, S, D]; a prefill chunk computes far more than this copy costs."""
    num_spans, num_kv_heads, num_keys, dim = keys.shape
    spread = keys[:, :, None].expand(num_spans, num_kv_heads, group_size, num_keys, dim)
    return spread.reshape(num_spans, num_kv_heads * group_size, num_keys, dim)


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    options: LayerOptions,
    group_size: int,
    *,
    is_causal: bool = False,
) -> Tensor:
    def attend(keys: Tensor, values: Tensor) -> Tensor:
        if options.softcap is None and options.sinks is None:
            return F.scaled_dot_product_attention(
                query, keys, values, attn_mask=mask, is_causal=is_causal, scale=options.scaling
            )
        eager_mask = mask
        if is_causal:
            eager_mask = torch.full((query.shape[2], keys.shape[2]), float("-inf"), device=query.device).triu_(1)
        return _attend_eagerly(query, keys, values, eager_mask, options, group_size)

    has_hidden_keys = mask is not None or is_causal
    return attend_seen(attend, query, keys, values, mask) if has_hidden_keys else attend(keys, values)


def _attend_eagerly(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, options: LayerOptions, group_size: int
) -> Tensor:
    """Softcaps and sinks, which no fused kernel on the processor knows; scores and softmax in float32."""
    scores = (query @ keys.transpose(-1, -2)).float() * options.scaling
    if options.softcap is not None:
        scores = torch.tanh(scores / options.softcap) * options.softcap
    if mask is not None:
        scores = scores + mask
    if options.sinks is not None:
        num_spans, num_heads, num_rows, _ = scores.shape
        sinks = options.sinks.float().view(1, num_heads, group_size, 1, 1)
        column = sinks.expand(num_spans, -1, -1, num_rows // group_size, 1).reshape(num_spans, num_heads, num_rows, 1)
        scores = torch.cat((scores, column), dim=-1)
    probs = torch.softmax(scores, dim=-1)[..., : keys.shape[2]]
    return probs.to(values.dtype) @ values


# Attention by torch's kernels that ignores hidden keys even if they hold NaN or infinity.
#
# Those kernels add a mask to scores and multiply values by weights, and NaN survives both: -inf + NaN and 0 * NaN are
# NaN. Blocks keep what their last owner wrote, and a rejected draft may overflow, so hidden keys can hold anything.


def attend_seen(
    attend: Callable[[Tensor, Tensor], Tensor], query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> Tensor:
    """Return `attend(keys, values)` as if the keys hidden from a row were zeros for this row, [B, H, Q, D].

    A finite result is returned as it is, since a hidden number that entered it would show. If the result is not finite,
    NaN and infinite keys become zeros, and the rows that see one become NaN. A row that is still not finite has a score
    that overflows. It is computed alone with its hidden keys as zeros, so only its own scores decide.

    Args:
        attend: computes the attention of `query`.
        query: [B, H, Q, D].
        keys: [B, H, S, D].
        values: [B, H, S, D of the values].
        mask: additive, broadcast to [B, H, Q, S]; None where row i sees the keys up to i.
    """
    out = attend(keys, values)
    if math.isfinite(out.sum(dtype=torch.float32)):
        return out
    num_batches, _, num_rows, _ = query.shape
    is_seen = _causal(query, keys) if mask is None else mask == 0
    is_seen = is_seen.expand(num_batches, 1, num_rows, keys.shape[2])
    is_finite = keys.isfinite().all(dim=-1) & values.isfinite().all(dim=-1)  # [B, H, S]
    sees_fault = (is_seen & ~is_finite.all(dim=1)[:, None, None]).any(dim=-1)  # [B, 1, Q]
    keys, values = (_cleaned(numbers, is_finite) for numbers in (keys, values))
    out = attend(keys, values)
    overflows = ~(out.isfinite().all(dim=-1) | sees_fault)  # [B, H, Q]
    for row in overflows.flatten(0, 1).any(dim=0).nonzero().flatten().tolist():
        out[:, :, row] = attend(_cleaned(keys, is_seen[:, :, row]), values)[:, :, row]
    return out.masked_fill(sees_fault[..., None], math.nan)


def _cleaned(numbers: Tensor, is_kept: Tensor) -> Tensor:
    """Return a copy with the other keys zeroed, in the same layout: another layout may round differently.

    Dims of stride 0, which repeat one kv head, are cleaned once and repeated again.
    """
    once = tuple(slice(1) if stride == 0 else slice(None) for stride in numbers.stride())
    part = numbers[once]
    copy = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=part.device).copy_(part)
    return copy.masked_fill_(~is_kept[once[:3]][..., None], 0.0).expand(numbers.shape)


def _causal(query: Tensor, keys: Tensor) -> Tensor:
    """True where a row sees a key, [Q, S]."""
    return torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool, device=query.device).tril_()
