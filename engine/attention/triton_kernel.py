"""The Triton kernels of paged attention: one attends to keys and values tile by tile, one merges the results of splits.

A tile is one kv head and up to BLOCK_M packed rows of one span: row m is query head m % G of token m // G, so that the
G heads which share keys read them once. A program computes one tile over one range of keys [begin, end):

             keys  begin ............ full_end ...... end        scores [BLOCK_M, BLOCK_N] at a time,
    token i, head 0  x  x  x  x  x  x  x | x  .  .  .            online softmax in float32 (arXiv:2205.14135);
    token i, head 1  x  x  x  x  x  x  x | x  .  .  .            left of full_end no mask is computed
    token j, head 0  x  x  x  x  x  x  x | x  x  .  .
    token j, head 1  x  x  x  x  x  x  x | x  x  .  .            j = i + 1

Where a tile's keys are cut into several ranges ("splits"), each program leaves its sums, and `merge_splits` adds them
(arXiv:2311.01282). Nothing here knows of sequences or layers: `engine.attention.triton_tiles` decides who computes
what. Kernels need compute capability 8.0, 8.9 for float8 keys; TRITON_INTERPRET=1, set before the first import, runs
them on the processor.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

# Columns of the lists of work, as triton_tiles.TileField and MergeField number them.
TILE_FIELDS = tl.constexpr(9)
MERGE_FIELDS = tl.constexpr(5)

_LOG2_E = tl.constexpr(1.4426950408889634)
_FLOOR = tl.constexpr(-1.0e30)  # finite, so that a row which has seen no key yet makes no NaN
_TREE_NODES = tl.constexpr(64)  # bits of an ancestor mask


@triton.jit
def attend_tiles(  # a kernel takes pointers and numbers, no structures
    out,  # [T, H * G, D of the values]
    query,  # [T, H * G, D], any strides but the last
    keys,  # [N, P, H, D]
    values,  # [N, P, H, D of the values]
    block_tables,  # [all spans' blocks] int32, end to end
    tiles,  # [W, TILE_FIELDS] int32
    ancestors,  # [T] int64, 0 for a token of a chain; or None
    positions,  # [T] int32, with `ancestors`
    sinks,  # [H * G] or None
    key_scales,  # [H] float32, the divisor of stored keys; or None
    value_scales,  # [H] float32 or None
    sums,  # [partials, H, BLOCK_M, VALUE_WIDTH] float32
    peaks,  # [partials, H, BLOCK_M] float32
    totals,  # [partials, H, BLOCK_M] float32
    scale,
    query_row_stride,
    query_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEY_WIDTH: tl.constexpr,  # the dims rounded up to powers of two, at least 16
    VALUE_WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    SOFTCAP: tl.constexpr,  # 0: none
    OPERAND: tl.constexpr,  # the dtype of the factors
    IS_BATCH_INVARIANT: tl.constexpr,  # one code for all keys: two may be compiled to other roundings
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One program per tile, split and kv head; heads come first, so that neighbours read the same pages of memory.

    It is one long function: Triton has no structures, and a part of the loop would take all of its state as arguments.
    """
    head = tl.program_id(0) % NUM_KV_HEADS
    tile = tiles + (tl.program_id(0) // NUM_KV_HEADS) * TILE_FIELDS
    table = block_tables + tl.load(tile)
    first_row = tl.load(tile + 1)
    num_rows = tl.load(tile + 2)
    start = tl.load(tile + 3)
    tree_start = tl.load(tile + 4)
    first_packed = tl.load(tile + 5)
    begin = tl.load(tile + 6)
    end = tl.load(tile + 7)
    partial = tl.load(tile + 8)

    # Load the tile's queries: rows x query heads of one kv head, packed along M.
    packed = first_packed + tl.arange(0, BLOCK_M)
    row = packed // GROUP_SIZE
    is_row = row < num_rows
    query_head = head * GROUP_SIZE + packed % GROUP_SIZE
    dims = tl.arange(0, KEY_WIDTH)
    at = query + (first_row + row).to(tl.int64)[:, None] * query_row_stride + query_head[:, None] * query_head_stride
    q = tl.load(at + dims[None, :], mask=is_row[:, None] & (dims[None, :] < KEY_DIM), other=0.0).to(OPERAND)  # [M, D]

    place = start + row  # the token's index; in a chain it sees all places up to its own
    position = place
    ancestor_mask = None
    if ancestors is not None:
        ancestor_mask = tl.load(ancestors + first_row + row, mask=is_row, other=0)
        position = tl.load(positions + first_row + row, mask=is_row, other=0)
    score_scale = scale
    if key_scales is not None:
        score_scale = score_scale * tl.load(key_scales + head)

    peak = tl.full([BLOCK_M], _FLOOR, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE_WIDTH], tl.float32)
    # Keys that every row sees need no mask; only the rest is masked.
    full_end = begin
    if WINDOW == 0 and not IS_BATCH_INVARIANT:
        everyone_sees = tl.minimum(tl.minimum(start + first_packed // GROUP_SIZE + 1, tree_start), end)
        full_end = begin + tl.maximum(everyone_sees - begin, 0) // BLOCK_N * BLOCK_N
        acc, peak, total = _read(
            acc, peak, total, q, keys, values, table, head, begin, full_end, end, place, position, ancestor_mask,
            tree_start, score_scale, False, NUM_KV_HEADS, BLOCK_SIZE, KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH,
            WINDOW, SOFTCAP, BLOCK_N,
        )  # fmt: skip
    acc, peak, total = _read(
        acc, peak, total, q, keys, values, table, head, full_end, end, end, place, position, ancestor_mask,
        tree_start, score_scale, True, NUM_KV_HEADS, BLOCK_SIZE, KEY_DIM, VALUE_DIM, KEY_WIDTH, VALUE_WIDTH,
        WINDOW, SOFTCAP, BLOCK_N,
    )  # fmt: skip
    if value_scales is not None:
        acc = acc * tl.load(value_scales + head)

    # Store the result, or the partial state if the tile is one of several splits.
    columns = tl.arange(0, VALUE_WIDTH)
    if partial < 0:
        if sinks is not None:
            sink = tl.load(sinks + query_head, mask=is_row, other=0.0).to(tl.float32)
            total += tl.exp2(sink * _LOG2_E - peak)
        result = acc / total[:, None]
        at_row = out + ((first_row + row).to(tl.int64) * NUM_KV_HEADS * GROUP_SIZE + query_head) * VALUE_DIM
        is_kept = is_row[:, None] & (columns[None, :] < VALUE_DIM)
        tl.store(at_row[:, None] + columns[None, :], result.to(out.dtype.element_ty), mask=is_kept)
    else:
        lane = (partial.to(tl.int64) * NUM_KV_HEADS + head) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(sums + lane[:, None] * VALUE_WIDTH + columns[None, :], acc, mask=is_row[:, None])
        tl.store(peaks + lane, peak, mask=is_row)
        tl.store(totals + lane, total, mask=is_row)


@triton.jit
def _read(  # a kernel takes pointers and numbers, no structures
    acc, peak, total, q, keys, values, table, head, begin, end, last, place, position, ancestor_mask,
    tree_start, score_scale, IS_MASKED: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the keys [begin, end) to the online softmax; keys from `last` on are never read."""
    key_dims = tl.arange(0, KEY_WIDTH)
    value_dims = tl.arange(0, VALUE_WIDTH)
    for first in range(begin, end, BLOCK_N):
        key_place = first + tl.arange(0, BLOCK_N)
        readable = tl.minimum(key_place, last - 1)  # a tail reads its last key again, and hides it
        # Gather the keys through the block table, and compute their scores.
        block = tl.load(table + readable // BLOCK_SIZE).to(tl.int64)
        slot = (block * BLOCK_SIZE + readable % BLOCK_SIZE) * NUM_KV_HEADS + head  # [N]
        k = _load_rows(keys, slot, key_dims, KEY_DIM, KEY_WIDTH)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee") * score_scale  # [M, N]
        if SOFTCAP > 0:
            scores = SOFTCAP * (2 * tl.sigmoid(scores * (2 / SOFTCAP)) - 1)  # SOFTCAP * tanh(scores / SOFTCAP)
        scores = scores * _LOG2_E
        if IS_MASKED:
            is_seen = _is_seen(key_place, place, position, ancestor_mask, tree_start, WINDOW)
            scores = tl.where(is_seen, scores, float("-inf"))
        # Online softmax: rescale the sums so far to the new peak.
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - new_peak[:, None])
        fade = tl.exp2(peak - new_peak)
        total = total * fade + tl.sum(weights, 1)
        v = _load_rows(values, slot, value_dims, VALUE_DIM, VALUE_WIDTH)
        if IS_MASKED:
            # Zero times NaN is NaN: a value that is not finite counts for the rows that see it alone.
            v = v.to(tl.float32)
            is_finite = tl.abs(v) < float("inf")
            v = tl.where(is_finite, v, 0.0)
            is_fault = tl.max(tl.where(is_finite, 0, 1), 1)  # [N]
            sees_fault = tl.max(tl.where(is_seen, is_fault[None, :], 0), 1)  # [M]
            total = tl.where(sees_fault > 0, float("nan"), total)
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * fade[:, None], input_precision="ieee")
        peak = new_peak
    return acc, peak, total


@triton.jit
def _load_rows(pool, slot, dims, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Rows of the pool, [N, WIDTH], zero beyond DIM."""
    at = pool + slot[:, None] * DIM + dims[None, :]
    if DIM == WIDTH:
        return tl.load(at)
    return tl.load(at, mask=dims[None, :] < DIM, other=0.0)


@triton.jit
def _is_seen(key_place, place, position, ancestor_mask, tree_start, WINDOW: tl.constexpr):
    """[M, N]: a token of a chain sees up to its own place, a node of a tree its ancestors and all before the tree.

    Keys after a range are hidden too: it ends at a multiple of BLOCK_N, or after the places of all rows.
    """
    keys = key_place[None, :]
    is_seen = keys <= place[:, None]
    if WINDOW > 0:
        # True of all ancestors that the window leaves: a node's place is not before its position.
        is_seen = is_seen & (keys > (position - WINDOW)[:, None])
    if ancestor_mask is not None:
        bit = tl.minimum(tl.maximum(keys - tree_start, 0), _TREE_NODES - 1).to(tl.int64)
        is_ancestor = ((ancestor_mask[:, None] >> bit) & 1) != 0
        in_tree = (ancestor_mask != 0)[:, None] & (keys >= tree_start)
        is_seen = is_seen & (is_ancestor | ~in_tree)
    return is_seen


@triton.jit(do_not_specialize=["num_lanes"])
def merge_splits(  # a kernel takes pointers and numbers, no structures
    out,  # [T, H * G, D of the values]
    merges,  # [tiles that were split, MERGE_FIELDS] int32
    num_lanes,  # of a tile's BLOCK_M packed rows, those that any of the tiles fills
    sinks,  # [H * G] or None
    sums,  # as `attend_tiles` left them
    peaks,
    totals,
    NUM_KV_HEADS: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_S: tl.constexpr,  # splits at a time
):
    """One program per packed row of a tile that was split."""
    lane = tl.program_id(0) % num_lanes
    head = tl.program_id(0) // num_lanes % NUM_KV_HEADS
    merge = merges + (tl.program_id(0) // (num_lanes * NUM_KV_HEADS)) * MERGE_FIELDS
    first_row = tl.load(merge)
    num_rows = tl.load(merge + 1)
    packed = tl.load(merge + 2) + lane
    first_partial = tl.load(merge + 3)
    num_partials = tl.load(merge + 4)
    if packed < num_rows * GROUP_SIZE:
        columns = tl.arange(0, VALUE_WIDTH)
        peak = tl.full([1], _FLOOR, tl.float32)
        total = tl.zeros([1], tl.float32)
        acc = tl.zeros([VALUE_WIDTH], tl.float32)
        # Rescale each split's sums to the common peak, and add them up.
        for first in range(0, num_partials, BLOCK_S):
            split = first + tl.arange(0, BLOCK_S)
            is_split = split < num_partials
            at = ((first_partial + split).to(tl.int64) * NUM_KV_HEADS + head) * BLOCK_M + lane
            split_peaks = tl.load(peaks + at, mask=is_split, other=_FLOOR)
            new_peak = tl.maximum(peak, tl.max(split_peaks, 0))
            weights = tl.where(is_split, tl.exp2(split_peaks - new_peak), 0.0)  # [S]
            parts = tl.load(sums + at[:, None] * VALUE_WIDTH + columns[None, :], mask=is_split[:, None], other=0.0)
            fade = tl.exp2(peak - new_peak)
            total = total * fade + tl.sum(weights * tl.load(totals + at, mask=is_split, other=0.0), 0)
            acc = acc * fade + tl.sum(weights[:, None] * parts, 0)
            peak = new_peak
        # Add the sink, normalize and store.
        query_head = head * GROUP_SIZE + packed % GROUP_SIZE
        if sinks is not None:
            total += tl.exp2(tl.load(sinks + query_head).to(tl.float32) * _LOG2_E - peak)
        row = (first_row + packed // GROUP_SIZE).to(tl.int64)
        at_row = out + (row * NUM_KV_HEADS * GROUP_SIZE + query_head) * VALUE_DIM
        tl.store(at_row + columns, (acc / total).to(out.dtype.element_ty), mask=columns < VALUE_DIM)
