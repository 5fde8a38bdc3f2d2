"""Paged attention on the GPU: one launch of our Triton kernel for decode, verification, trees and prefill chunks alike.

It replaces the processor's `engine.attention.torch_attention.TorchAttention`. The tests compare the two, and the
agreement check of `engine.model.paged_model` does at every start. Import it only where Triton is installed.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cache as memoized

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs

from engine.attention.ancestor_mask import ancestor_masks
from engine.attention.base import LayerOptions
from engine.attention.triton_kernel import attend_tiles, merge_splits
from engine.attention.triton_tiles import (
    BATCH_INVARIANT_SPLIT_TOKENS,
    HeadShape,
    Ints,
    MergeField,
    RowLayout,
    SpanField,
    TilePlan,
    Tiling,
    choose_split,
    choose_tiling,
    num_keys_of,
    power_of_two,
    split_tiles,
    whole_tiles,
)
from engine.batch.indexing import Index, send, upload
from engine.batch.span import Span
from engine.kv_cache.pool import KVCache

_OPERANDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class RowMasks:
    """Ancestors and positions of the rows of draft trees, for passes that hold a tree."""

    ancestors: Tensor  # [T] int64, see engine.attention.ancestor_mask
    positions: Tensor  # [T] int32

    @classmethod
    def of(cls, spans: Seq[Span], window: int | None, device: torch.device) -> RowMasks | None:
        """None where every span is a chain, whose masks follow from the places."""
        if not any(span.parents for span in spans):
            return None
        ancestors = [bits for span in spans for bits in ancestor_masks(span, window)]
        positions = [position for span in spans for position in span.positions]
        return cls(upload(ancestors, torch.int64, device), upload(positions, torch.int32, device))


@dataclass(frozen=True, slots=True)
class Launch:
    """The work of one pass for all layers of one window and one set of head sizes, on the device."""

    tiling: Tiling
    block_tables: Tensor  # [blocks of all spans] int32, end to end
    tiles: Tensor  # [W, fields] int32
    merges: Tensor  # [tiles in splits, fields] int32
    num_partials: int
    num_lanes: int  # packed rows to merge of each tile in splits
    masks: RowMasks | None
    is_batch_invariant: bool = False

    @classmethod
    def of(
        cls,
        plan: TilePlan,
        tiling: Tiling,
        group_size: int,
        block_tables: Tensor,
        masks: RowMasks | None,
        *,
        is_batch_invariant: bool = False,
    ) -> Launch:
        tiles, merges = (send(torch.from_numpy(rows).int(), block_tables.device) for rows in (plan.tiles, plan.merges))
        num_lanes = min(tiling.block_m, group_size * int(plan.merges[:, MergeField.NUM_ROWS].max(initial=0)))
        return cls(tiling, block_tables, tiles, merges, plan.num_partials, num_lanes, masks, is_batch_invariant)


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    launch: Launch,
    options: LayerOptions,
    scales: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Return the attention of a pass's rows over their blocks, [T, H * G, D of the values], in the query's dtype.

    query [T, H * G, D], float32, float16 or bfloat16, contiguous in D; keys [N, P, H, D] and values, contiguous, of the
    same dtype or float8_e4m3fn. Scores, softmax and sums are float32, weights have the query's dtype when they meet the
    values. `scales` are factors of stored keys and values, [H] float32 each, for pools of float8. Nothing waits for the
    device.
    """
    assert query.stride(-1) == 1, "a head's numbers lie side by side"
    assert keys.is_contiguous() and values.is_contiguous(), "slots are counted through all blocks"  # noqa: PT018
    num_kv_heads, value_dim = keys.shape[2], values.shape[-1]
    num_rows, num_heads, _ = query.shape
    sizes = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP_SIZE": num_heads // num_kv_heads,
        "VALUE_DIM": value_dim,
        "VALUE_WIDTH": max(16, power_of_two(value_dim)),
        "BLOCK_M": launch.tiling.block_m,
    }
    out = query.new_empty(num_rows, num_heads, value_dim)
    lanes = (launch.num_partials, num_kv_heads, launch.tiling.block_m)
    # Partial states of split tiles; `merge_splits` combines them.
    sums = query.new_empty(*lanes, sizes["VALUE_WIDTH"], dtype=torch.float32)
    peaks, totals = query.new_empty(2, *lanes, dtype=torch.float32)
    partials = sums, peaks, totals
    with torch.cuda.device_of(query):
        _attend(out, query, keys, values, launch, options, scales, partials, sizes)
        if launch.num_partials:
            # One program per packed row of a split tile.
            merge_splits[(launch.merges.shape[0] * num_kv_heads * launch.num_lanes,)](
                out,
                launch.merges,
                launch.num_lanes,
                options.sinks,
                *partials,
                **sizes,
                BLOCK_S=1 if launch.is_batch_invariant else 8,
                num_warps=1,
            )
    return out


def _attend(
    out: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    launch: Launch,
    options: LayerOptions,
    scales: tuple[Tensor | None, Tensor | None],
    partials: tuple[Tensor, Tensor, Tensor],
    sizes: dict[str, int],
) -> None:
    """Launch one program per tile and kv head."""
    _, block_size, num_kv_heads, key_dim = keys.shape
    tiling, masks = launch.tiling, launch.masks
    attend_tiles[(launch.tiles.shape[0] * num_kv_heads,)](
        out,
        query,
        keys,
        values,
        launch.block_tables,
        launch.tiles,
        None if masks is None else masks.ancestors,
        None if masks is None else masks.positions,
        options.sinks,
        *scales,
        *partials,
        options.scaling,
        query.stride(0),
        query.stride(1),
        **sizes,
        BLOCK_SIZE=block_size,
        KEY_DIM=key_dim,
        KEY_WIDTH=max(16, power_of_two(key_dim)),
        WINDOW=options.window or 0,
        SOFTCAP=options.softcap or 0.0,
        OPERAND=operand(query.dtype),
        IS_BATCH_INVARIANT=launch.is_batch_invariant,
        BLOCK_N=tiling.block_n,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def heads_of(query: Tensor, key: Tensor, value: Tensor) -> HeadShape:
    """Return the head sizes of a layer with these inputs, [1, heads, T, D] each."""
    return HeadShape(key.shape[1], query.shape[1] // key.shape[1], key.shape[3], value.shape[3])


def read_layer(cache: KVCache, layer: int, query: Tensor, launch: Launch, options: LayerOptions) -> Tensor:
    """Call `paged_attention` for an `AttentionPass`: query [1, H * G, T, D] -> [1, T, H * G, D of the values]."""
    rows = query[0].transpose(0, 1)  # [T, H * G, D]
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    return paged_attention(rows, cache.keys[layer], cache.values[layer], launch, options)[None]


def batch_invariant_triton(spans: Seq[Span], cache: KVCache, slots: Index) -> TritonAttention:
    """Attention of deterministic models on GPUs, for chains: a tree's node is not read as the chain it may become.

    A row's keys are added in one order: steps and splits begin at fixed places, splits are merged one after the other,
    and keys that the row does not see, on either side, add exact zeros.
    """
    assert not any(span.parents for span in spans), "the runner refuses trees"
    return TritonAttention(spans, cache, slots, is_batch_invariant=True)


class TritonAttention:
    """The `engine.attention.base.AttentionPass` of GPUs; layers with the same window and head sizes share a layout."""

    def __init__(self, spans: Seq[Span], cache: KVCache, slots: Index, *, is_batch_invariant: bool = False) -> None:
        """`is_batch_invariant`: a row's bits depend neither on how the text is cut nor on other rows."""
        self._is_batch_invariant = is_batch_invariant
        self._cache = cache
        self._slots = slots
        self._layout = RowLayout.of(spans, cache.block_size)
        self._block_tables = send(torch.from_numpy(self._layout.tables), cache.device)
        self._launches: dict[tuple[int | None, HeadShape], Launch] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        self._cache.write(layer, self._slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        launch = self.launch(options.window, heads_of(query, key, value), query.itemsize)
        return read_layer(self._cache, layer, query, launch, options)

    def launch(self, window: int | None, heads: HeadShape, itemsize: int) -> Launch:
        """The work of every layer of this window and these heads, for queries of `itemsize` bytes per number."""
        launch = self._launches.get((window, heads))
        if launch is None:
            launch = self._launches[window, heads] = self._lay_out(window, heads, itemsize)
        return launch

    def _lay_out(self, window: int | None, heads: HeadShape, itemsize: int) -> Launch:
        is_batch_invariant = self._is_batch_invariant
        longest = int(self._layout.of_field(SpanField.NUM_ROWS).max())
        tiling = choose_tiling(longest, heads, itemsize, is_batch_invariant=is_batch_invariant)
        tiles = whole_tiles(self._layout, window, tiling, heads.group_size)
        plan = split_tiles(tiles, split_length(tiles, heads, self._cache, is_batch_invariant=is_batch_invariant))
        masks = RowMasks.of(self._layout.spans, window, self._cache.device)
        return Launch.of(
            plan, tiling, heads.group_size, self._block_tables, masks, is_batch_invariant=is_batch_invariant
        )


def split_length(tiles: Ints, heads: HeadShape, cache: KVCache, *, is_batch_invariant: bool) -> int:
    """Return the keys per split of a pass with these tiles over this pool."""
    if is_batch_invariant:
        return BATCH_INVARIANT_SPLIT_TOKENS
    return choose_split(num_keys_of(tiles), heads.num_kv_heads, num_processors(cache.device))


def operand(dtype: torch.dtype) -> tl.dtype:
    """Return the kernel's dtype for products with queries of `dtype`; the interpreter has no products in bfloat16."""
    if dtype is torch.bfloat16 and knobs.runtime.interpret:
        return tl.float32
    return _OPERANDS[dtype]


@memoized
def num_processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 where Triton's interpreter runs the kernels one program after another."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
