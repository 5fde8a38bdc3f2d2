"""Which rows of a flat pass read which keys: index tensors and masks, built once per pass and used by every layer.

Rows of the pass are cut into *reads*. Short spans (decode and verification) are read many at a time, padded to a common
number of rows and blocks; a prefill chunk is one read; so is a long span whose blocks are one run: it is read in place.
A sliding window has its own reads, trimmed to the blocks that it can see.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.index import Index, index_of, index_tensor, is_run
from engine.kv_cache import KVCache
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
    rows: Index
    blocks: Index
    mask: Tensor | None
    is_causal: bool = False

    @property
    def is_packed(self) -> bool:
        """Whether the query heads of a kv head are folded into rows; a prefill chunk has rows enough without."""
        return self.num_rows <= MAX_PACKED_ROWS

    def at_step(self, step: int) -> Read:
        """The same spans when they compute only their row `step`, as they do when they decode one token at a time.

        Every span has all of its Q rows. Keys of later steps are in the read, and masked.
        """
        if isinstance(self.rows, slice):
            rows: Index = slice(self.rows.start // self.num_rows, self.rows.stop // self.num_rows)
        else:
            rows = self.rows[:: self.num_rows] // self.num_rows
        mask = None if self.mask is None else self.mask[:, :, step : step + 1]
        return replace(self, num_rows=1, rows=rows, mask=mask)


@dataclass(frozen=True, slots=True)
class _Extent:
    """One span in the pass: its first row, and what is known of the blocks that its rows see."""

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


class ReadPlan:
    """The reads of one pass, for any window."""

    def __init__(self, spans: Seq[Span], cache: KVCache) -> None:
        self._spans = spans
        self._block_size = cache.block_size
        self._min_view_tokens = cache.min_view_tokens
        self._dtype = cache.dtype
        self._device = cache.device
        self._shared: dict[int | None, list[Read]] = {}

    def reads(self, window: int | None) -> list[Read]:
        """Reads that cover each row once. `window` is how many tokens a row sees, itself included; None is all."""
        alone: list[_Extent] = []
        together: list[_Extent] = []
        for extent in self._extents(window):
            (alone if self._is_alone(extent) else together).append(extent)
        return [self._single(extent, window) for extent in alone] + [
            self._single(bucket[0], window) if len(bucket) == 1 else self._padded(bucket, window)
            for bucket in _buckets(together, self._block_size)
        ]

    def step_reads(self, step: int, window: int | None) -> list[Read]:
        """Reads of the pass that computes only row `step` of each span; the tensors of all steps are built at once."""
        if window not in self._shared:
            self._shared[window] = self.reads(window)
        return [read.at_step(step) for read in self._shared[window]]

    def _extents(self, window: int | None) -> Iterator[_Extent]:
        first_row = 0
        for span in self._spans:
            first_key = 0 if window is None else max(0, span.start - window + 1)
            first_block = first_key // self._block_size
            block_ids = span.block_table[first_block : -(-span.end // self._block_size)]
            yield _Extent(span, first_row, first_block * self._block_size, block_ids)
            first_row += len(span.token_ids)

    def _is_alone(self, extent: _Extent) -> bool:
        if extent.num_rows > MAX_PACKED_ROWS:
            return True
        return extent.num_blocks * self._block_size >= self._min_view_tokens and is_run(extent.block_ids)

    def _single(self, extent: _Extent, window: int | None) -> Read:
        """One span, with exactly the keys that it needs."""
        num_rows, span = extent.num_rows, extent.span
        num_keys = span.end - extent.first_key
        # Folded heads repeat rows, which the kernel's own causal mask cannot express.
        is_causal = num_rows > MAX_PACKED_ROWS and span.start == 0 and (window is None or num_keys <= window)
        positions = torch.arange(span.start, span.end, device=self._device)[None]  # [1, Q]
        is_mask_needed = not is_causal and (num_rows > 1 or (window is not None and num_keys > window))
        return Read(
            num_spans=1,
            num_rows=num_rows,
            num_keys=num_keys,
            rows=slice(extent.first_row, extent.first_row + num_rows),
            blocks=index_of(extent.block_ids, self._device),
            mask=self._mask(positions, [extent.first_key], num_keys, window) if is_mask_needed else None,
            is_causal=is_causal,
        )

    def _padded(self, bucket: list[_Extent], window: int | None) -> Read:
        """Several short spans; padded keys lie behind every row's position and padded rows repeat the last one."""
        num_rows = max(extent.num_rows for extent in bucket)
        num_blocks = max(extent.num_blocks for extent in bucket)
        steps = [[min(row, extent.num_rows - 1) for row in range(num_rows)] for extent in bucket]  # [B, Q]
        positions = [[extent.span.start + step for step in row] for extent, row in zip(bucket, steps, strict=True)]
        rows = [extent.first_row + step for extent, row in zip(bucket, steps, strict=True) for step in row]
        blocks: list[int] = []
        for extent in bucket:
            blocks += extent.block_ids
            # Padding is the span's own last block: never another sequence's numbers.
            blocks += [extent.block_ids[-1]] * (num_blocks - extent.num_blocks)
        num_keys = num_blocks * self._block_size
        first_keys = [extent.first_key for extent in bucket]
        return Read(
            num_spans=len(bucket),
            num_rows=num_rows,
            num_keys=num_keys,
            rows=index_of(rows, self._device),
            blocks=index_tensor(blocks, self._device),
            mask=self._mask(torch.tensor(positions, device=self._device), first_keys, num_keys, window),
        )

    def _mask(self, positions: Tensor, first_keys: list[int], num_keys: int, window: int | None) -> Tensor:
        """0 where a row at `positions` [B, Q] sees the key, -inf elsewhere; [B, 1, Q, S]."""
        rows = positions[:, None, :, None]  # [B, 1, Q, 1]
        keys = torch.arange(num_keys, device=self._device)  # [S]
        if any(first_keys):
            keys = keys + index_tensor(first_keys, self._device)[:, None, None, None]  # [B, 1, 1, S]
        is_hidden = keys > rows
        if window is not None:
            is_hidden |= keys <= rows - window
        mask = torch.zeros(is_hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(is_hidden, float("-inf"))


def _buckets(extents: list[_Extent], block_size: int) -> Iterator[list[_Extent]]:
    """Group extents of similar length, shortest first, so that padding stays cheap against the keys that are needed."""
    bucket: list[_Extent] = []
    num_needed = 0
    for extent in sorted(extents, key=lambda extent: extent.num_blocks):
        num_padding = (len(bucket) * extent.num_blocks - num_needed) * block_size
        if num_padding > max(_MIN_PADDING_TOKENS, _MAX_PADDING_RATIO * num_needed * block_size):
            yield bucket
            bucket, num_needed = [], 0
        bucket.append(extent)
        num_needed += extent.num_blocks
    if bucket:
        yield sorted(bucket, key=lambda extent: extent.first_row)
