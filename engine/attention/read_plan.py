"""Keys that the rows of a forward batch read: index tensors and masks, built once per pass and used by every layer.

Rows of the pass are cut into *reads*. Short spans (decode and verification) are read many at a time, padded to a common
number of rows and blocks; a prefill chunk is one read; so is a long span whose blocks are one run: it is read in place.
Steps of spans that share most of their blocks read each block once (`engine.attention.read_plan`). A sliding window
has its own reads, trimmed to the blocks that it can see. Nodes of a draft tree see the committed tokens and their
ancestors only.

Spans that share most of their blocks, read together: each block once, and a mask for who sees which.

    span A   [ 3 ][ 4 ][ 5 ]
    span B   [ 3 ][ 4 ][ 9 ]      one read of blocks 3 4 5 9; block 5 is hidden from B and block 9 from A

Branches of one sequence are such spans, and so are sequences with a long prefix in common.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.attention.ancestor_mask import hide_in_tree
from engine.batch.indexing import Index, index_of, index_tensor, is_consecutive
from engine.batch.span import Span
from engine.kv_cache.pool import KVCache


@dataclass(frozen=True, slots=True)
class Extent:
    """One span in the pass: its first row, and the blocks that its rows see."""

    span: Span
    first_row: int
    first_key: int  # position of the first key in the first of the blocks
    block_ids: Seq[int]

    @property
    def num_rows(self) -> int:
        return len(self.span.token_ids)

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)

    def steps(self, num_rows: int) -> list[int]:
        """The span's own rows, the last one repeated up to `num_rows`."""
        return [min(row, self.num_rows - 1) for row in range(num_rows)]


@dataclass(frozen=True, slots=True)
class SharedExtents:
    """Extents with equally many rows, and the position of the first key of each block that any of them reads."""

    extents: tuple[Extent, ...]
    first_keys: dict[int, int]  # by block id

    @property
    def num_rows(self) -> int:
        """Rows of each extent."""
        return self.extents[0].num_rows


def share(extents: Seq[Extent], block_size: int) -> list[SharedExtents]:
    """Return the groups of `extents` that are better read together; other extents are in no group."""
    by_start: dict[tuple[int, int], list[Extent]] = defaultdict(list)
    for extent in extents:
        by_start[extent.block_ids[0], extent.num_rows].append(extent)
    groups = []
    most = 16  # extents of one group
    for members in by_start.values():
        for first in range(0, len(members), most):
            group = _shared(members[first : first + most], block_size)
            # With fewer saved blocks the mask costs more than it saves.
            if len(group.first_keys) <= 0.5 * sum(each.num_blocks for each in group.extents):
                groups.append(group)
    return groups


def _shared(extents: Seq[Extent], block_size: int) -> SharedExtents:
    first_keys = {
        block_id: each.first_key + index * block_size
        for each in extents
        for index, block_id in enumerate(each.block_ids)
    }
    return SharedExtents(tuple(extents), first_keys)


def hidden_keys(groups: Seq[SharedExtents], block_size: int, window: int | None, device: torch.device) -> Tensor:
    """Return True where a key is hidden from a row: [B, M, Q, S] for B groups padded to M extents of Q rows and S keys.

    Extents and blocks are padded at the end: extents by the last one, blocks by ones that no row sees.
    """
    num_extents = max(len(group.extents) for group in groups)
    num_blocks = max(len(group.first_keys) for group in groups)
    starts, first_keys, sees = [], [], []
    for group in groups:
        padded = [*group.extents, *[group.extents[-1]] * (num_extents - len(group.extents))]
        num_missing = num_blocks - len(group.first_keys)
        starts.append([each.span.start for each in padded])
        first_keys.append([*group.first_keys.values(), *[0] * num_missing])
        sees.append([_sees(each, group.first_keys) + [False] * num_missing for each in padded])
    steps = torch.arange(groups[0].num_rows, device=device)
    rows = (torch.tensor(starts, device=device)[:, :, None] + steps)[..., None]  # [B, M, Q, 1]
    offsets = torch.arange(block_size, device=device)
    keys = (torch.tensor(first_keys, device=device)[:, :, None] + offsets).flatten(1)[:, None, None]  # [B, 1, 1, S]
    is_hidden = ~torch.tensor(sees, device=device).repeat_interleave(block_size, dim=2)[:, :, None] | (keys > rows)
    return is_hidden if window is None else is_hidden | (keys <= rows - window)


def _sees(extent: Extent, block_ids: dict[int, int]) -> list[bool]:
    own = set(extent.block_ids)
    return [block_id in own for block_id in block_ids]


MAX_PACKED_ROWS = 16  # longer spans are prefill chunks


@dataclass(frozen=True, slots=True)
class KVRead:
    """B spans of up to Q rows that attend together to up to S keys each.

    `rows` are their rows of the pass, span by span, the last one repeated where a span has fewer than Q; `blocks` are
    the pool's blocks that hold the keys, [B * M] or one run; `mask` is additive, [B, 1, Q, S], None where every row
    sees every key or `is_causal` hides the same ones. A group of spans that share their keys counts as one span here,
    and each of them has `rows_per_span` of the Q rows.
    """

    num_spans: int
    num_rows: int
    num_keys: int
    rows: Index
    blocks: Index
    mask: Tensor | None
    rows_per_span: int
    is_causal: bool = False

    @property
    def is_packed(self) -> bool:
        """True if the query heads of a kv head are folded into rows; a prefill chunk has rows enough without."""
        return self.num_rows <= MAX_PACKED_ROWS

    def at_step(self, step: int) -> KVRead:
        """The same spans when they compute only their row `step`, as they do when they decode one token at a time.

        Every span has all of its rows. Keys of later steps are in the read, and masked.
        """
        num_steps = self.rows_per_span
        if isinstance(self.rows, slice):
            rows: Index = slice(self.rows.start // num_steps, self.rows.stop // num_steps)
        else:
            rows = self.rows[::num_steps] // num_steps
        mask = None if self.mask is None else self.mask[:, :, step::num_steps]
        return replace(self, num_rows=self.num_rows // num_steps, rows_per_span=1, rows=rows, mask=mask)


class ReadPlan:
    """The reads of one pass, for any window."""

    def __init__(self, spans: Seq[Span], cache: KVCache) -> None:
        self._spans = spans
        self._block_size = cache.block_size
        self._min_view_tokens = cache.min_view_tokens
        self._dtype = cache.dtype
        self._device = cache.device
        self._all_steps: dict[int | None, list[KVRead]] = {}

    def reads(self, window: int | None) -> list[KVRead]:
        """Reads that cover each row once. `window` is how many tokens a row sees, itself included; None is all."""
        return self._reads_of(list(self._extents(window)), window)

    def _reads_of_steps(self, window: int | None) -> list[KVRead]:
        """`reads`, with one for all spans that share blocks; one step has few enough rows for that."""
        extents = list(self._extents(window))
        groups = share(extents, self._block_size)
        shared = {id(extent) for group in groups for extent in group.extents}
        reads = self._reads_of([extent for extent in extents if id(extent) not in shared], window)
        return [*reads, self._shared(groups, window)] if groups else reads

    def _reads_of(self, extents: Seq[Extent], window: int | None) -> list[KVRead]:
        alone: list[Extent] = []
        together: list[Extent] = []
        for extent in extents:
            (alone if self._is_alone(extent) else together).append(extent)
        return [self._single(extent, window) for extent in alone] + [
            self._single(bucket[0], window) if len(bucket) == 1 else self._padded(bucket, window)
            for bucket in _buckets(together, self._block_size)
        ]

    def step_reads(self, step: int, window: int | None) -> list[KVRead]:
        """Reads of the pass that computes only row `step` of each span; the tensors of all steps are built at once."""
        if window not in self._all_steps:
            self._all_steps[window] = self._reads_of_steps(window)
        return [read.at_step(step) for read in self._all_steps[window]]

    def _extents(self, window: int | None) -> Iterator[Extent]:
        first_row = 0
        for span in self._spans:
            first_block = span.first_key(window) // self._block_size
            block_ids = span.block_table[first_block : -(-span.end // self._block_size)]
            yield Extent(span, first_row, first_block * self._block_size, block_ids)
            first_row += len(span.token_ids)

    def _is_alone(self, extent: Extent) -> bool:
        if extent.num_rows > MAX_PACKED_ROWS:
            return True
        return extent.num_blocks * self._block_size >= self._min_view_tokens and is_consecutive(extent.block_ids)

    def _single(self, extent: Extent, window: int | None) -> KVRead:
        """One span, with exactly the keys that it needs."""
        num_rows, span = extent.num_rows, extent.span
        num_keys = span.end - extent.first_key
        # Folded heads repeat rows, which the kernel's own causal mask cannot express.
        is_whole = span.start == 0 and not span.parents and (window is None or num_keys <= window)
        is_causal = num_rows > MAX_PACKED_ROWS and is_whole
        is_partial = bool(span.parents) or (window is not None and num_keys > window)
        is_mask_needed = not is_causal and (num_rows > 1 or is_partial)
        return KVRead(
            num_spans=1,
            num_rows=num_rows,
            rows_per_span=num_rows,
            num_keys=num_keys,
            rows=slice(extent.first_row, extent.first_row + num_rows),
            blocks=index_of(extent.block_ids, self._device),
            mask=self._mask([extent], num_rows, num_keys, window) if is_mask_needed else None,
            is_causal=is_causal,
        )

    def _padded(self, bucket: list[Extent], window: int | None) -> KVRead:
        """Several short spans; padded keys come after every row's position and padded rows repeat the last one."""
        num_rows = max(extent.num_rows for extent in bucket)
        num_blocks = max(extent.num_blocks for extent in bucket)
        rows = [extent.first_row + step for extent in bucket for step in extent.steps(num_rows)]
        blocks: list[int] = []
        for extent in bucket:
            blocks += extent.block_ids
            # Padding is the span's own last block: never another sequence's numbers.
            blocks += [extent.block_ids[-1]] * (num_blocks - extent.num_blocks)
        num_keys = num_blocks * self._block_size
        return KVRead(
            num_spans=len(bucket),
            num_rows=num_rows,
            rows_per_span=num_rows,
            num_keys=num_keys,
            rows=index_of(rows, self._device),
            blocks=index_tensor(blocks, self._device),
            mask=self._mask(bucket, num_rows, num_keys, window),
        )

    def _shared(self, groups: Seq[SharedExtents], window: int | None) -> KVRead:
        """Groups of spans that share blocks; short groups repeat their last span, and their last block unseen."""
        is_hidden = hidden_keys(groups, self._block_size, window, self._device)  # [B, M, Q, S]
        num_spans, num_steps, num_keys = is_hidden.shape[1:]
        rows: list[int] = []
        blocks: list[int] = []
        for group in groups:
            padded = [*group.extents, *[group.extents[-1]] * (num_spans - len(group.extents))]
            rows += [extent.first_row + step for extent in padded for step in range(num_steps)]
            blocks += group.first_keys
            blocks += [next(reversed(group.first_keys))] * (num_keys // self._block_size - len(group.first_keys))
        return KVRead(
            num_spans=len(groups),
            num_rows=num_spans * num_steps,
            rows_per_span=num_steps,
            num_keys=num_keys,
            rows=index_of(rows, self._device),
            blocks=index_tensor(blocks, self._device),
            mask=self._additive(is_hidden.flatten(1, 2)[:, None]),  # [B, 1, M * Q, S]
        )

    def _mask(self, extents: Seq[Extent], num_rows: int, num_keys: int, window: int | None) -> Tensor:
        """0 where a row sees the key, -inf elsewhere; [B, 1, Q, S]."""
        places = torch.tensor([[extent.span.start + step for step in extent.steps(num_rows)] for extent in extents])
        rows = places[:, None, :, None].to(self._device)  # [B, 1, Q, 1]
        keys = torch.arange(num_keys, device=self._device)  # [S]
        first_keys = [extent.first_key for extent in extents]
        if any(first_keys):
            keys = keys + index_tensor(first_keys, self._device)[:, None, None, None]  # [B, 1, 1, S]
        is_hidden = keys > rows
        if window is not None:
            is_hidden |= keys <= rows - window
        for index, extent in enumerate(extents):
            if extent.span.parents:
                hide_in_tree(is_hidden[index, 0], extent.span, extent.steps(num_rows), extent.first_key, window)
        return self._additive(is_hidden)

    def _additive(self, is_hidden: Tensor) -> Tensor:
        mask = torch.zeros(is_hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(is_hidden, float("-inf"))


def _buckets(extents: list[Extent], block_size: int) -> Iterator[list[Extent]]:
    """Group extents of similar length, shortest first, so that padding stays cheap against the keys that are needed."""
    bucket: list[Extent] = []
    num_needed = 0
    for extent in sorted(extents, key=lambda extent: extent.num_blocks):
        num_padding = (len(bucket) * extent.num_blocks - num_needed) * block_size
        if num_padding > max(512, 0.25 * num_needed * block_size):  # little padding costs less than one more read
            yield bucket
            bucket, num_needed = [], 0
        bucket.append(extent)
        num_needed += extent.num_blocks
    if bucket:
        yield sorted(bucket, key=lambda extent: extent.first_row)
