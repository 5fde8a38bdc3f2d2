"""Attention whose result for a row depends only on the row and the keys it sees: torch, on the processor.

Calls of torch's kernel have few shapes: `_ROWS` rows of one sequence by whole units of keys. Keys that a row does not
see are masked. The kernel takes the keys unit by unit, and a masked unit adds exact zeros. So a token has the same bits
in a decode, in a verification, in a prefill chunk of any size and in any batch.

    tile of 8 rows     [ places 509 510 511 512 513, and three times 513 again ]
    keys               [ unit 0: 0 ... 511 ][ unit 1: 512, 513, then masked ... 1023 ]

A node of a draft tree attends along its own path, as the chain that it becomes when accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention.base import LayerOptions
from engine.attention.torch_attention import attend_seen
from engine.batch.draft import path_to
from engine.batch.indexing import Index, index_tensor
from engine.batch.span import Span
from engine.kv_cache.pool import KVCache

_ROWS = 8  # a verification of K = 7; more of them are several tiles
_UNIT = 512  # keys that torch's kernel takes at a time


@dataclass(frozen=True, slots=True)
class _RowGroup:
    """Rows of the pass that see the same keys, each up to its own place among them."""

    rows: Seq[int]
    places: Seq[int]  # per row: the last key that it sees; ascending
    key_slots: Seq[int]  # slot of each key from the first on


# The slots of all keys, and the tiles over them: keys [begin, end), and their mask [G * _ROWS, S], which is added.
_Layout = tuple[Tensor, list[tuple[int, int, Tensor]]]


class BatchInvariantAttention:
    """The `engine.attention.base.AttentionPass` of deterministic models, laid out once per distinct window."""

    def __init__(self, spans: Seq[Span], cache: KVCache, slots: Index) -> None:
        self._cache = cache
        self._slots = slots
        self._chains = list(_chains(spans, cache.block_size))
        tiled = [_full(chain.rows[at : at + _ROWS]) for chain in self._chains for at in _starts(chain)]
        rows = [row for tile in tiled for row in tile]
        self._rows = index_tensor(rows, cache.device)  # [tiles * _ROWS], rows of the pass
        place_of = {row: place for place, row in enumerate(rows)}
        self._order = index_tensor((place_of[row] for row in range(len(place_of))), cache.device)  # [T]
        self._layouts: dict[tuple[int | None, int], _Layout] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        self._cache.write(layer, self._slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        num_heads, num_kv_heads = query.shape[1], key.shape[1]
        group_size = num_heads // num_kv_heads
        key_slots, tiles = self._layout(options.window, group_size)
        keys, values = self._cache.read_slots(layer, key_slots)  # [all keys, H, D]
        num_tiles = len(tiles)
        rows = query[0].index_select(1, self._rows).view(num_kv_heads, group_size, num_tiles, _ROWS, -1)
        packed = rows.permute(2, 0, 1, 3, 4).reshape(num_tiles, 1, num_kv_heads, group_size * _ROWS, -1)
        outs = [
            _attend(packed[index], keys[begin:end], values[begin:end], mask, options)
            for index, (begin, end, mask) in enumerate(tiles)
        ]
        out = torch.cat(outs).view(num_tiles, num_kv_heads, group_size, _ROWS, -1)
        by_row = out.permute(0, 3, 1, 2, 4).reshape(num_tiles * _ROWS, num_heads, -1)
        return by_row.index_select(0, self._order)[None]  # [1, T, H * G, D]

    def _layout(self, window: int | None, group_size: int) -> _Layout:
        layout = self._layouts.get((window, group_size))
        if layout is None:
            layout = self._layouts[window, group_size] = self._lay_out(window, group_size)
        return layout

    def _lay_out(self, window: int | None, group_size: int) -> _Layout:
        key_slots: list[int] = []
        tiles = []
        for chain in self._chains:
            first = _first_key(chain.places[0], window)
            start = len(key_slots)
            key_slots += _whole_units(chain.key_slots[first:])
            for at in _starts(chain):
                places = _full(chain.places[at : at + _ROWS])
                begin, end = _first_key(places[0], window), -(-(places[-1] + 1) // _UNIT) * _UNIT
                mask = self._mask(places, begin, end, window).repeat(group_size, 1)
                tiles.append((start + begin - first, start + end - first, mask))
        return index_tensor(key_slots, self._cache.device), tiles

    def _mask(self, places: Seq[int], begin: int, end: int, window: int | None) -> Tensor:
        """Return 0 where a row sees the key, -inf elsewhere; [_ROWS, S]."""
        rows = torch.tensor(places)[:, None]
        keys = torch.arange(begin, end)
        is_hidden = keys > rows
        if window is not None:
            is_hidden |= keys <= rows - window
        return torch.zeros(is_hidden.shape, dtype=self._cache.dtype).masked_fill_(is_hidden, float("-inf"))


def _attend(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor, options: LayerOptions) -> Tensor:
    """Return [1, H, G * _ROWS, D] for a query [1, H, G * _ROWS, D] and keys and values [S, H, D]."""
    keys, values = keys[None].transpose(1, 2), values[None].transpose(1, 2)
    attend = partial(F.scaled_dot_product_attention, query, attn_mask=mask, scale=options.scaling)
    return attend_seen(attend, query, keys, values, mask)


def _chains(spans: Seq[Span], block_size: int) -> Iterator[_RowGroup]:
    first_row = 0
    for span in spans:
        slots = [block * block_size + offset for block in span.block_table for offset in range(block_size)]
        if span.num_chained:
            end = span.start + span.num_chained
            yield _RowGroup(range(first_row, first_row + span.num_chained), range(span.start, end), slots[:end])
        for step in range(span.num_chained, len(span.token_ids)):
            path = path_to(span.parents, span.start + step - span.tree_start)
            key_slots = [*slots[: span.tree_start], *(slots[span.tree_start + node] for node in path)]
            yield _RowGroup((first_row + step,), (len(key_slots) - 1,), key_slots)
        first_row += len(span.token_ids)


def _starts(chain: _RowGroup) -> range:
    """Return the first row of each tile."""
    return range(0, len(chain.rows), _ROWS)


def _full(values: Seq[int]) -> list[int]:
    """Return a value for each row of a tile: the last one is repeated."""
    return [*values, *[values[-1]] * (_ROWS - len(values))]


def _whole_units(key_slots: Seq[int]) -> list[int]:
    """Pad to whole units with the sequence's own last key, never with another sequence's numbers."""
    return [*key_slots, *[key_slots[-1]] * (-len(key_slots) % _UNIT)]


def _first_key(place: int, window: int | None) -> int:
    """Return the start of the first unit that a row at `place` sees."""
    return 0 if window is None else max(0, place - window + 1) // _UNIT * _UNIT
