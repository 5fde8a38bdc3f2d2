"""Spans that share most of their blocks, read together: each block once, and a mask for who sees which.

    span A   [ 3 ][ 4 ][ 5 ]
    span B   [ 3 ][ 4 ][ 9 ]      one read of blocks 3 4 5 9; block 5 is hidden from B and block 9 from A

Branches of one sequence are such spans, and so are sequences with a long prefix in common.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch.span import Span

_MAX_SPANS = 16  # rows of one step that attend to the same keys
_MIN_SAVED_SHARE = 0.5  # of the blocks to be read; below it the mask costs more than it saves


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
    """The groups of `extents` that are better read together; the others are in none."""
    by_start: dict[tuple[int, int], list[Extent]] = defaultdict(list)
    for extent in extents:
        by_start[extent.block_ids[0], extent.num_rows].append(extent)
    groups = []
    for members in by_start.values():
        for first in range(0, len(members), _MAX_SPANS):
            group = _shared(members[first : first + _MAX_SPANS], block_size)
            if len(group.first_keys) <= (1 - _MIN_SAVED_SHARE) * sum(each.num_blocks for each in group.extents):
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
