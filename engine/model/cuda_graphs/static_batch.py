"""A pass whose tensors stay where they are: filled for every pass anew, so that a recording of it can be replayed."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.attention.base import AttentionPass, LayerOptions, PlanAttention
from engine.indexing import copy_array
from engine.kv_cache.pool import KVCache
from engine.model.cuda_graphs.buckets import GraphBucket, pad
from engine.model.forward_batch import ForwardBatch
from engine.span import Span


class StaticBatch:
    """The `ForwardBatch` of one bucket.

    Attributes:
        batch: what the model computes; its tensors are those that `fill` writes to.
    """

    def __init__(
        self, bucket: GraphBucket, cache: KVCache, scratch_block: int, num_positions: int, attention: StaticAttention
    ) -> None:
        """`num_positions` bounds all positions, now and later."""
        self._bucket = bucket
        self._scratch_block = scratch_block
        self._block_size = cache.block_size
        self._attention = attention
        self._numbers = torch.zeros(3, bucket.num_rows, dtype=torch.long, device=cache.device)  # ids, positions, slots
        self._numbers[2] = scratch_block * cache.block_size
        ids, positions, slots = self._numbers
        self.batch = ForwardBatch(ids, positions, num_positions, None, attention)
        attention.slots = slots

    def fill(self, spans: Seq[Span]) -> None:
        """Lay out `spans`, which fit the bucket, and padding behind them. Nothing waits for the device."""
        padded = pad(spans, self._bucket, self._scratch_block, self._block_size)
        tables = [np.asarray(span.block_table[: -(-span.end // self._block_size)], np.int32) for span in padded]
        copy_array(self._numbers, self._lay_out(padded, tables))
        self._attention.fill(padded, np.concatenate(tables))

    def _lay_out(self, spans: Seq[Span], tables: Seq[NDArray[np.int32]]) -> NDArray[np.int64]:
        """Ids, positions and slots of all rows, [3, T]."""
        num_rows = self._bucket.num_rows
        counts = np.array([len(span.token_ids) for span in spans])
        starts = np.array([span.start for span in spans])
        first_rows = np.cumsum(counts) - counts
        first_blocks = np.cumsum([0, *map(len, tables[:-1])])
        index = np.repeat(np.arange(len(spans)), counts)  # the span of each row
        places = np.arange(num_rows) + (starts - first_rows)[index]
        blocks = np.concatenate(tables)[first_blocks[index] + places // self._block_size]
        positions = places
        if any(span.parents for span in spans):
            positions = np.fromiter(chain.from_iterable(span.positions for span in spans), np.int64, num_rows)
        ids = np.fromiter(chain.from_iterable(span.token_ids for span in spans), np.int64, num_rows)
        return np.stack([ids, positions, blocks * np.int64(self._block_size) + places % self._block_size])


class StaticAttention(AttentionPass):
    """The attention of a `StaticBatch`."""

    slots: Tensor

    def fill(self, spans: Seq[Span], tables: NDArray[np.int32]) -> None:
        """Lay out the padded pass; `tables` are the spans' block tables end to end, each as long as its span needs."""


class PlannedAttention(StaticAttention):
    """Attention that is planned anew for every pass: it is computed call by call, never replayed."""

    def __init__(self, cache: KVCache, plan_attention: PlanAttention) -> None:
        self._cache = cache
        self._plan_attention = plan_attention
        self._planned: AttentionPass | None = None

    def fill(self, spans: Seq[Span], tables: NDArray[np.int32]) -> None:
        self._planned = self._plan_attention(spans, self._cache).whole(self.slots)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        assert self._planned is not None, "a pass is filled before it is computed"
        return self._planned.attend(layer, query, key, value, options)
