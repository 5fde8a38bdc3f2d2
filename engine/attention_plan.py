"""Which rows of a flat pass read which keys: index tensors and masks, built once per pass and used by every layer.

Rows of the pass are cut into *reads*. Short spans (decode and verification) are read many at a time, padded to a common
number of rows and blocks; a prefill chunk is one read; so is a long span whose blocks are one run: it is read in place.
A sliding window has its own reads, trimmed to the blocks that it can see.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from engine.span import Span

MAX_PACKED_ROWS = 16  # longer spans are prefill chunks
_MIN_PADDING_TOKENS = 512  # padding below this costs less than one more read
_MAX_PADDING_RATIO = 0.25


@dataclass(frozen=True, slots=True)
class Read:
    """B spans of up to Q rows that attend together to up to S keys each.

    `rows` are their rows of the pass, span by span, the last one repeated where a span has fewer than Q; `blocks` are
    the pool's blocks that hold the keys, [B * M] or one run; `mask` is additive, [B, 1, Q, S], None where every row
    sees every key or where `is_causal` says the same.
    """

    num_spans: int
    num_rows: int
    num_keys: int
    rows: slice | Tensor
    blocks: slice | Tensor
    mask: Tensor | None
    is_causal: bool = False

    @property
    def is_packed(self) -> bool:
        return self.num_rows <= MAX_PACKED_ROWS


@dataclass(frozen=True, slots=True)
class _Extent:
    """One span in the pass: its first row, and the blocks [first_block, end_block) of its table that its rows see."""

    span: Span
    first_row: int
    first_block: int
    end_block: int
    first_id: int | None  # pool block that starts the run, None where the blocks are no run

    @property
    def num_rows(self) -> int:
        return len(self.span.token_ids)

    @property
    def num_blocks(self) -> int:
        return self.end_block - self.first_block

    @property
    def block_ids(self) -> Seq[int]:
        return self.span.block_table[self.first_block : self.end_block]


def plan_reads(
    spans: Seq[Span],
    block_size: int,
    window: int | None,
    *,
    min_view_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
) -> list[Read]:
    """Cut a pass into reads that cover each row once. `window` is how many tokens a row sees, itself included.

    A run of at least `min_view_tokens` keys is read in place, on its own, rather than gathered with others.
    """
    build = _ReadBuilder(block_size, window, dtype, device)
    extents = list(_extents(spans, block_size, window))
    alone = [extent for extent in extents if _reads_alone(extent, block_size, min_view_tokens)]
    together = [extent for extent in extents if not _reads_alone(extent, block_size, min_view_tokens)]
    return [build.single(extent) for extent in alone] + [
        build.single(bucket[0]) if len(bucket) == 1 else build.padded(bucket)
        for bucket in _buckets(together, block_size)
    ]


def _extents(spans: Seq[Span], block_size: int, window: int | None) -> Iterator[_Extent]:
    first_row = 0
    for span in spans:
        first_key = 0 if window is None else max(0, span.start - window + 1)
        first_block, end_block = first_key // block_size, -(-span.end // block_size)
        ids = span.block_table[first_block:end_block]
        is_run = all(later == earlier + 1 for earlier, later in pairwise(ids))
        yield _Extent(span, first_row, first_block, end_block, ids[0] if is_run else None)
        first_row += len(span.token_ids)


def _reads_alone(extent: _Extent, block_size: int, min_view_tokens: int) -> bool:
    if extent.num_rows > MAX_PACKED_ROWS:
        return True
    return extent.first_id is not None and extent.num_blocks * block_size >= min_view_tokens


def _buckets(extents: list[_Extent], block_size: int) -> Iterator[list[_Extent]]:
    """Group extents of similar length, shortest first, so that padding stays cheap against the keys that are needed."""
    bucket: list[_Extent] = []
    num_needed = 0
    for extent in sorted(extents, key=lambda extent: (extent.num_blocks, extent.first_row)):
        num_padding = ((len(bucket) + 1) * extent.num_blocks - num_needed - extent.num_blocks) * block_size
        if bucket and num_padding > max(_MIN_PADDING_TOKENS, _MAX_PADDING_RATIO * num_needed * block_size):
            yield bucket
            bucket, num_needed = [], 0
        bucket.append(extent)
        num_needed += extent.num_blocks
    if bucket:
        yield sorted(bucket, key=lambda extent: extent.first_row)


class _ReadBuilder:
    def __init__(self, block_size: int, window: int | None, dtype: torch.dtype, device: torch.device) -> None:
        self._block_size = block_size
        self._window = window
        self._dtype = dtype
        self._device = device

    def single(self, extent: _Extent) -> Read:
        """One span, with exactly the keys that it needs."""
        num_rows, span = extent.num_rows, extent.span
        first_key = extent.first_block * self._block_size
        num_keys = span.end - first_key
        is_causal = first_key == 0 == span.start and num_rows > 1 and (self._window is None or num_keys <= self._window)
        use_flag = is_causal and num_rows > MAX_PACKED_ROWS  # packed heads repeat rows, which the flag cannot express
        positions = np.arange(span.start, span.end)[None]  # [1, Q]
        return Read(
            num_spans=1,
            num_rows=num_rows,
            num_keys=num_keys,
            rows=slice(extent.first_row, extent.first_row + num_rows),
            blocks=self._run_or_index(extent),
            mask=None if use_flag else self._mask(positions, np.array([first_key]), num_keys),
            is_causal=use_flag,
        )

    def padded(self, bucket: list[_Extent]) -> Read:
        """Several short spans; padded keys lie behind every row's position and padded rows repeat the last one."""
        num_rows = max(extent.num_rows for extent in bucket)
        num_blocks = max(extent.num_blocks for extent in bucket)
        steps = np.minimum(np.arange(num_rows), np.array([[extent.num_rows - 1] for extent in bucket]))  # [B, Q]
        rows = (steps + np.array([[extent.first_row] for extent in bucket])).reshape(-1)  # [B * Q]
        positions = steps + np.array([[extent.span.start] for extent in bucket])
        blocks = np.empty((len(bucket), num_blocks), dtype=np.int64)
        for index, extent in enumerate(bucket):
            blocks[index, : extent.num_blocks] = extent.block_ids
            blocks[index, extent.num_blocks :] = extent.block_ids[-1]  # its own block: never another sequence's numbers
        first_keys = np.array([extent.first_block * self._block_size for extent in bucket])
        num_keys = num_blocks * self._block_size
        return Read(
            num_spans=len(bucket),
            num_rows=num_rows,
            num_keys=num_keys,
            rows=self._slice_or_index(rows),
            blocks=self._tensor(blocks.reshape(-1)),
            mask=self._mask(positions, first_keys, num_keys),
        )

    def _mask(self, positions: np.ndarray, first_keys: np.ndarray, num_keys: int) -> Tensor | None:
        """0 where a row at `positions` [B, Q] sees the key, -inf elsewhere; [B, 1, Q, S], None if all would be 0."""
        rows = self._tensor(positions)[:, :, None]  # [B, Q, 1]
        keys = self._tensor(first_keys)[:, None, None] + torch.arange(num_keys, device=self._device)  # [B, 1, S]
        is_hidden = keys > rows
        if self._window is not None:
            is_hidden |= keys <= rows - self._window
        if not is_hidden.any():
            return None
        mask = torch.zeros(is_hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(is_hidden, float("-inf"))[:, None]

    def _run_or_index(self, extent: _Extent) -> slice | Tensor:
        if extent.first_id is None:
            return self._tensor(np.asarray(extent.block_ids))
        return slice(extent.first_id, extent.first_id + extent.num_blocks)

    def _slice_or_index(self, rows: np.ndarray) -> slice | Tensor:
        if np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
            return slice(int(rows[0]), int(rows[0]) + len(rows))
        return self._tensor(rows)

    def _tensor(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device)
