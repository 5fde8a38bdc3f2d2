"""The states of recurrent layers in one forward batch. A span starts from one state and writes later ones to slots.

Every row is computed by the same operations in the same order, in a chunk of any length, as a draft or alone. So a
row's result depends only on the state before it, and neither chunks nor drafts change a bit of a state.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch.indexing import copy_array, index_tensor, send_arrays
from engine.batch.span import Span, SpanStates
from engine.kv_cache.state_pool import StatePool, StateShape
from engine.native.library import kernel, kernels_for
from engine.sequence.sequence import ZEROS


class RowSlots(NamedTuple):
    """The slots of a pass on its device, for kernels that read them there."""

    spans: Tensor  # [S, 2] int64: the first row of each span, and the row after its last
    rows: Tensor  # [T, 3] int64: the rows of its span before a row, the slot before the span, the slot after it or -1


def slot_arrays(states: Seq[SpanStates], starts: Seq[int], ends: Seq[int]) -> tuple[NDArray[np.int64], ...]:
    """Return `spans` and `rows` of a pass's `RowSlots`. If several rows write to one slot, only the last one does."""
    rows = np.full((ends[-1], 3), -1, np.int64)
    for each, start, end in zip(states, starts, ends, strict=True):
        rows[start:end, 0], rows[start:end, 1] = np.arange(end - start), each.before
        last = {slot: count for count, slot in sorted(each.after.items())}
        assert each.before not in last or end == start + 1, "rows read the slot before their span while others write"
        for slot, count in last.items():
            rows[start + count - 1, 2] = slot
    return np.array([starts, ends], np.int64).T, rows


class PooledStates:
    """The states of a pass's spans, in slots of a pool."""

    def __init__(self, spans: Seq[Span], pool: StatePool) -> None:
        self.pool = pool
        self._spans = spans
        self.ends = list(accumulate(len(span.token_ids) for span in spans))
        self.starts = [0, *self.ends[:-1]]
        self._windows: dict[int, _Window] = {}

    @cached_property
    def states(self) -> list[SpanStates]:
        """The slots of each span; unused for a head's spans, which have none."""
        return [_states_of(span) for span in self._spans]

    @cached_property
    def scan_slots(self) -> list[Tensor]:
        """For the kernel: the slot before each span, the end of its rows, and the slot after each row or -1."""
        after = [-1] * self.ends[-1]
        for each, start in zip(self.states, self.starts, strict=True):
            for rows, slot in each.after.items():
                after[start + rows - 1] = slot
        columns = ([each.before for each in self.states], self.ends, after)
        return [torch.tensor(column, dtype=torch.int64) for column in columns]

    @cached_property
    def row_slots(self) -> RowSlots:
        """The spans, for kernels on a GPU."""
        return RowSlots(*send_arrays(slot_arrays(self.states, self.starts, self.ends), self.pool.device))

    def at(self, layer: int) -> PooledLayer:
        """Return the pass's part of a recurrent layer, by its index among these."""
        return PooledLayer(self, layer)

    def window(self, num_rows: int) -> _Window:
        """Return the indices of convolutions that look `num_rows` back."""
        if num_rows not in self._windows:
            self._windows[num_rows] = _Window(self, num_rows)
        return self._windows[num_rows]


class StaticStates(PooledStates):
    """States of recorded passes of one shape: `fill` replaces the slots. Only layers that read `row_slots` use it."""

    def __init__(self, pool: StatePool, num_spans: int, num_rows: int) -> None:
        """`num_spans` is the most of a pass; all have `num_rows`."""
        super().__init__((), pool)
        self._numbers = torch.zeros(2 * num_spans + 3 * num_rows, dtype=torch.int64, device=pool.device)
        of_spans, of_rows = self._numbers.split([2 * num_spans, 3 * num_rows])
        self.row_slots = RowSlots(of_spans.view(-1, 2), of_rows.view(-1, 3))

    def fill(self, spans: Seq[Span]) -> None:
        """Lay out `spans`. Nothing waits for the device."""
        ends = list(accumulate(len(span.token_ids) for span in spans))
        of_spans, of_rows = slot_arrays(list(map(_states_of, spans)), [0, *ends[:-1]], ends)
        numbers = np.zeros(len(self._numbers), np.int64)  # launches have programs for more spans, which have no rows
        numbers[: of_spans.size], numbers[-of_rows.size :] = of_spans.ravel(), of_rows.ravel()
        copy_array(self._numbers, numbers)


def _states_of(span: Span) -> SpanStates:
    if span.states is not None:
        return span.states
    assert span.start == 0, "a span within a text has the slot of the state before it"
    return SpanStates(ZEROS, {})


class _Window:
    """Where a convolution's inputs are: in S * R rows of states, followed by the pass's T rows."""

    def __init__(self, states: PooledStates, num_rows: int) -> None:
        num_kept, device = len(states.states) * num_rows, states.pool.device
        sources: list[list[int]] = []  # of the input before each span's first row, and of its rows
        for index, (start, end) in enumerate(zip(states.starts, states.ends, strict=True)):
            kept = range(index * num_rows, (index + 1) * num_rows)
            sources.append([*kept, *range(num_kept + start, num_kept + end)])
        self.before = index_tensor((each.before for each in states.states), device)
        self.inputs = [
            index_tensor((at for source in sources for at in source[back : len(source) - num_rows + back]), device)
            for back in range(num_rows + 1)
        ]
        after = [
            (source, rows, slot)
            for source, each in zip(sources, states.states, strict=True)
            for rows, slot in each.after.items()
        ]
        self.slots = index_tensor((slot for _, _, slot in after), device)
        self.kept = index_tensor((at for source, rows, _ in after for at in source[rows : rows + num_rows]), device)


class PooledLayer:
    """One recurrent layer in one forward batch, over the pool: scans by our kernel, the rest in torch.

    Attributes:
        rows: the convolution's inputs in all slots, [N, R, D].
        matrices: the matrices in all slots; None without any.
    """

    def __init__(self, states: PooledStates, layer: int) -> None:
        self._states = states
        self.rows = states.pool.rows[layer]
        self.matrices = states.pool.matrices[layer]

    @property
    def slots(self) -> list[Tensor]:
        """The slots of the pass's spans."""
        return self._states.scan_slots

    @property
    def row_slots(self) -> RowSlots:
        """The same on the device, for kernels on a GPU."""
        return self._states.row_slots

    def convolve(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the causal convolution of `rows` [T, D] by `weight` [D, R + 1], without activation."""
        num_rows, width = self.rows.shape[1:]
        window = self._states.window(num_rows)
        source = torch.cat((self.rows.index_select(0, window.before).flatten(0, 1), rows))
        self.rows.index_copy_(0, window.slots, source.index_select(0, window.kept).view(-1, num_rows, width))
        columns = weight.float().T.contiguous()
        out = source.index_select(0, window.inputs[0]).float() * columns[0]
        for index, column in zip(window.inputs[1:], columns[1:], strict=True):
            out += source.index_select(0, index).float() * column
        return out if bias is None else out + bias

    def scan_mamba2(self, x: Tensor, steps: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """Return the outputs of Mamba-2's recurrence, [T, H, P].

        Args:
            x: [T, H, P] float32.
            steps: the step sizes, [T, H].
            decay: the factors of the states, [T, H].
            b: what writes, [T, G, N].
            c: what reads, [T, G, N].
        """
        if (computed := self._native_scan(x, steps, decay, b, c, is_delta=False)) is not None:
            return computed
        group = x.shape[1] // b.shape[1]
        b, c = (each.repeat_interleave(group, dim=1)[:, :, None] for each in (b, c))  # [T, H, 1, N]
        written, decay, out = (x * steps[:, :, None])[..., None], decay[..., None, None], torch.empty_like(x)
        for row, state in self._scan():
            state.mul_(decay[row]).add_(written[row] * b[row])
            out[row] = (state * c[row]).sum(dim=-1)
        return out

    def scan_delta(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Return the outputs of the gated delta rule, [T, H, V].

        Args:
            query: [T, H, K] float32, normalized and scaled.
            key: [T, H, K], normalized.
            value: [T, H, V].
            decay: the factors of the states, [T, H].
            beta: how much of the difference is written, [T, H].
        """
        if (computed := self._native_scan(value, beta, decay, key, query, is_delta=True)) is not None:
            return computed
        decay, out = decay[..., None, None], torch.empty_like(value)
        key, query = key[..., None], query[..., None]  # [T, H, K, 1]
        for row, state in self._scan():
            state.mul_(decay[row])
            known = (state * key[row]).sum(dim=-2)
            state.add_(key[row] * ((value[row] - known) * beta[row, :, None])[:, None])
            out[row] = (state * query[row]).sum(dim=-2)
        return out

    def _native_scan(self, *rows: Tensor, is_delta: bool) -> Tensor | None:
        """Return the outputs of a scan by our kernel; None without a kernel for it.

        `rows` are x, steps, decay, b and c of `scan_mamba2`, or value, beta, decay, key and query of `scan_delta`.
        """
        assert self.matrices is not None, "the probe found matrices in this layer"
        if self.matrices.device.type != "cpu" or kernels_for(torch.float32) is None:
            return None
        rows, slots = tuple(each.contiguous() for each in rows), self.slots
        out = torch.empty_like(rows[0])
        (_, heads, width), (_, groups, depth) = rows[0].shape, rows[3].shape
        pointers = (each.data_ptr() for each in (*rows, out, self.matrices, *slots))
        sizes = (len(slots[0]), heads, groups, width, depth)
        return out if kernel("scan", "ppppppppppqqqqqi", "i")(*pointers, *sizes, int(is_delta)) else None

    def _scan(self) -> Iterator[tuple[int, Tensor]]:
        """Yield each row of the pass with its sequence's state before it, to be advanced in place."""
        assert self.matrices is not None, "the probe found matrices in this layer"
        for slots, start, end in zip(self._states.states, self._states.starts, self._states.ends, strict=True):
            state = self.matrices[slots.before].clone()
            for row in range(start, end):
                yield row, state
                if (slot := slots.after.get(row - start + 1)) is not None:
                    self.matrices[slot] = state


class RecordingStates:
    """Stands for `PooledStates`: computes nothing and records the shape of each layer's state."""

    def __init__(self) -> None:
        self._layers: dict[int, RecordingLayer] = {}

    def are_complete(self, layers: Seq[int]) -> bool:
        """True if each recurrent layer called its convolution, and all have matrices or all have no matrix."""
        found = self.shapes
        return (
            len(found) == len(layers)
            and all(each.num_rows for each in found)
            and len({bool(each.matrices) for each in found}) == 1
        )

    @property
    def shapes(self) -> list[StateShape]:
        """The shapes of all layers that were called, first to last."""
        return [StateShape(*each.window, each.matrices) for _, each in sorted(self._layers.items())]

    def at(self, layer: int) -> RecordingLayer:
        self._layers[layer] = recorded = RecordingLayer()
        return recorded


class RecordingLayer:
    """Stands for `PooledLayer`: computes nothing."""

    def __init__(self) -> None:
        self.window = (0, 0)
        self.matrices: tuple[int, ...] = ()

    def convolve(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.window = (weight.shape[-1] - 1, rows.shape[-1])
        return torch.zeros_like(rows)

    def scan_mamba2(self, x: Tensor, steps: Tensor, decay: Tensor, b: Tensor, c: Tensor) -> Tensor:
        self.matrices = (*x.shape[1:], b.shape[-1])
        return torch.zeros_like(x)

    def scan_delta(self, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        self.matrices = (*key.shape[1:], value.shape[-1])
        return torch.zeros_like(value)
