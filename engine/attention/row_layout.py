"""The numbers of a pass's spans as arrays: made once, and every list of a pass is derived from them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from engine.batch.span import Span

Ints = NDArray[np.int64]


class SpanField(IntEnum):
    """Columns of `RowLayout.columns`; places count from the start of the span's sequence."""

    TABLE_OFFSET = 0  # of the span's block table in all spans' concatenated tables
    FIRST_ROW = 1  # of the span in the pass
    NUM_ROWS = 2
    START = 3  # place of the span's first row
    TREE_START = 4  # place of its tree's first node; the span's end without a tree


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The spans of a pass, their numbers, and their block tables end to end, each as long as its span needs."""

    spans: Seq[Span]
    columns: Ints  # [spans, fields of a span]
    tables: NDArray[np.int32]
    block_size: int
    has_trees: bool

    @classmethod
    def of(cls, spans: Seq[Span], block_size: int) -> RowLayout:
        """Lay out `spans` (at least one) in order."""
        num_rows = np.array([len(span.token_ids) for span in spans])
        starts = np.array([span.start for span in spans])
        ends = starts + num_rows
        num_blocks = -(-ends // block_size)
        tables = array("i")
        for span, count in zip(spans, num_blocks.tolist(), strict=True):
            tables.extend(span.block_table[:count])
        has_trees = any(span.parents for span in spans)
        tree_starts = np.array([span.tree_start for span in spans]) if has_trees else ends
        columns = np.array([before(num_blocks), before(num_rows), num_rows, starts, tree_starts])
        return cls(spans, columns.T, np.frombuffer(tables, np.int32), block_size, has_trees)

    def of_field(self, field: SpanField) -> Ints:
        """Return a number of each span, [spans]."""
        return self.columns[:, field]

    @property
    def span_of_row(self) -> Ints:
        """Index of each row's span, [T]."""
        return np.repeat(np.arange(len(self.columns)), self.of_field(SpanField.NUM_ROWS))


def before(counts: Ints) -> Ints:
    """Return the sum of the counts before each."""
    return np.cumsum(counts) - counts
