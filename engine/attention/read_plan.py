"""Keys that the rows of a forward batch read: index tensors and masks, built once per pass and used by every layer.

Rows of the pass are cut into *reads*. Short spans (decode and verification) are read many at a time, padded to a common
number of rows and blocks; a prefill chunk is one read; so is a long span whose blocks are one run: it is read in place.
A sliding window has its own reads, trimmed to the blocks that it can see. Nodes of a draft tree see the committed
tokens and their ancestors only.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

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


MAX_PACKED_ROWS = 16  # longer spans are prefill chunks


@dataclass(frozen=True, slots=True)
class KVRead:
    """B spans of up to Q rows that attend together to up to S keys each.

    `rows` are their rows of the pass, span by span, the last one repeated where a span has fewer than Q; `blocks` are
    the pool's blocks that hold the keys, [B * M] or one run; `mask` is additive, [B, 1, Q, S], None where every row
    sees every key or `is_causal` hides the same ones.
    """

    num_spans: int
    num_rows: int
    num_keys: int
    rows: Index
    blocks: Index
    mask: Tensor | None
    is_causal: bool = False

    @property
    def is_packed(self) -> bool:
        """True if the query heads of a kv head are folded into rows; a prefill chunk has rows enough without."""
        return self.num_rows <= MAX_PACKED_ROWS


class ReadPlan:
    """The reads of one pass, for any window."""

    def __init__(self, spans: Seq[Span], cache: KVCache) -> None:
        self._spans = spans
        self._block_size = cache.block_size
        self._min_view_tokens = cache.min_view_tokens
        self._dtype = cache.dtype
        self._device = cache.device

    def reads(self, window: int | None) -> list[KVRead]:
        """Reads that cover each row once. `window` is how many tokens a row sees, itself included; None is all."""
        alone: list[Extent] = []
        together: list[Extent] = []
        for extent in self._extents(window):
            (alone if self._is_alone(extent) else together).append(extent)
        return [self._single(extent, window) for extent in alone] + [
            self._single(bucket[0], window) if len(bucket) == 1 else self._padded(bucket, window)
            for bucket in _buckets(together, self._block_size)
        ]

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
            num_keys=num_keys,
            rows=index_of(rows, self._device),
            blocks=index_tensor(blocks, self._device),
            mask=self._mask(bucket, num_rows, num_keys, window),
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
