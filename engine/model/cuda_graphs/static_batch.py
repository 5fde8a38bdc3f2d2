"""A pass with tensors at fixed addresses: refilled for every pass, so that a recording can be replayed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence as Seq
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from engine.attention.base import AttentionPass, LayerOptions, PlanAttention
from engine.attention.triton_tiles import Ints, RowLayout, SpanField
from engine.batch.indexing import copy_array
from engine.batch.span import Span
from engine.kv_cache.pool import KVCache
from engine.model.cuda_graphs.buckets import GraphBucket, max_spans, pad
from engine.model.forward_batch import ForwardBatch
from engine.recurrent.state_pass import StaticStates


class StaticBatch:
    """The `ForwardBatch` of one bucket.

    Attributes:
        batch: the model's input; `fill` writes to its tensors.
    """

    def __init__(
        self,
        bucket: GraphBucket,
        cache: KVCache,
        scratch_block: int,
        num_positions: int,
        max_batch: int,
        attention: StaticAttention,
    ) -> None:
        """`num_positions` bounds all positions, now and later; passes have up to `max_batch` sequences."""
        self._bucket = bucket
        self._scratch_block = scratch_block
        self._block_size = cache.block_size
        self._attention = attention
        self._numbers = torch.zeros(3, bucket.num_rows, dtype=torch.long, device=cache.device)  # ids, positions, slots
        self._numbers[2] = scratch_block * cache.block_size
        self._steps: Tensor  # [passes, 2, T] positions and slots
        ids, positions, slots = self._numbers
        self._states: StaticStates | None = None
        if cache.states is not None:
            num_spans = max_spans(bucket, max_batch, cache.block_size)
            self._states = StaticStates(cache.states, num_spans, bucket.num_rows)
        self.batch = ForwardBatch(ids, positions, num_positions, None, attention, self._states)
        attention.slots = slots

    def fill(self, spans: Seq[Span]) -> bool:
        """Lay out `spans`, which fit the bucket, and then padding; False if the attention has no room for them.

        Nothing waits for the device.
        """
        padded = pad(spans, self._bucket, self._scratch_block, self._block_size)
        layout = RowLayout.of(padded, self._block_size)
        copy_array(self._numbers, _numbers_of(layout, self._bucket.num_rows))
        if self._states is not None:
            self._states.fill(padded)
        return self._attention.fill(layout)

    def reserve_steps(self, num_steps: int) -> None:
        """Make room for so many passes at a time, of models without recurrent layers.

        Call it after the first computation.
        """
        self._steps = self._numbers.new_zeros(num_steps, *self._numbers[1:].shape)
        self._attention.reserve_steps(num_steps)

    def fill_steps(self, spans: Seq[Span]) -> bool:
        """Lay out a pass for each token of `spans`, all of one length; `take` chooses among them.

        False if the attention has no room for them. Nothing waits for the device.
        """
        steps = [[span.at_step(step) for span in spans] for step in range(len(spans[0].token_ids))]
        passes = [pad(step, self._bucket, self._scratch_block, self._block_size) for step in steps]
        last = RowLayout.of(passes[-1], self._block_size)  # its block tables are as long as any pass needs
        layouts = [last.moved(padded) for padded in passes]
        numbers = [_numbers_of(layout, self._bucket.num_rows)[1:] for layout in layouts]
        copy_array(self._steps[: len(steps)], np.stack(numbers))
        return self._attention.fill_steps(layouts)

    def take(self, step: Tensor) -> None:
        """Make `step` [1] int64, on the device, the pass that is computed next; its tokens are not changed."""
        torch.index_select(self._steps, 0, step, out=self._numbers[None, 1:])
        self._attention.take(step)


class StaticAttention(AttentionPass):
    """The attention of a `StaticBatch`."""

    slots: Tensor

    @abstractmethod
    def fill(self, layout: RowLayout) -> bool:
        """Lay out the padded pass; False if it takes more work than there is room for."""

    @abstractmethod
    def reserve_steps(self, num_steps: int) -> None:
        """Make room for so many passes at a time."""

    @abstractmethod
    def fill_steps(self, layouts: Seq[RowLayout]) -> bool:
        """Lay out padded passes with one set of block tables; False if one takes more work than there is room for."""

    @abstractmethod
    def take(self, step: Tensor) -> None:
        """Make `step` [1] int64, on the device, the pass that is computed next."""


class PlannedAttention(StaticAttention):
    """Attention planned again for every pass: computed call by call, never replayed."""

    def __init__(self, cache: KVCache, plan_attention: PlanAttention) -> None:
        self._cache = cache
        self._plan_attention = plan_attention
        self._planned: AttentionPass | None = None
        self._layouts: Seq[RowLayout] = ()

    def fill(self, layout: RowLayout) -> bool:
        self._planned = self._plan_attention(layout.spans, self._cache, self.slots)
        return True

    def reserve_steps(self, num_steps: int) -> None:
        """Do nothing: each pass is planned when it is taken."""

    def fill_steps(self, layouts: Seq[RowLayout]) -> bool:
        self._layouts = layouts
        return True

    def take(self, step: Tensor) -> None:
        if (index := int(step)) < len(self._layouts):
            self.fill(self._layouts[index])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: LayerOptions) -> Tensor:
        assert self._planned is not None, "a pass is filled before it is computed"
        return self._planned.attend(layer, query, key, value, options)


def _numbers_of(layout: RowLayout, num_rows: int) -> Ints:
    """Return ids, positions and slots of all rows, [3, T]."""
    spans, block_size = layout.spans, layout.block_size
    index = layout.span_of_row
    offsets = layout.of_field(SpanField.START) - layout.of_field(SpanField.FIRST_ROW)
    places = np.arange(num_rows) + offsets[index]
    blocks, offsets_in_blocks = np.divmod(places, block_size)
    numbers = np.empty((3, num_rows), np.int64)
    numbers[0] = np.fromiter(chain.from_iterable([span.token_ids for span in spans]), np.int64, num_rows)
    numbers[1] = places
    if layout.has_trees:
        numbers[1] = np.fromiter(chain.from_iterable([span.positions for span in spans]), np.int64, num_rows)
    np.multiply(layout.tables[layout.of_field(SpanField.TABLE_OFFSET)[index] + blocks], block_size, out=numbers[2])
    numbers[2] += offsets_in_blocks
    return numbers
