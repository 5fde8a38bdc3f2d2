"""Few buckets for many passes: small passes are padded to a bucket, so that a GPU can replay its recording.

      3 spans of a pass, 7 rows         bucket of 8 rows
      A A A B C C C               ->    A A A B C C C | .        the rest: a span on the scratch block

A bucket has a number of rows in all: 33 sequences, one of them with 4 drafts, take 37 rows, and not as many as 33
sequences with 4 drafts each. It has a longest span too, which sets the height of the attention's tiles: where the
number of drafts adapts, passes with short drafts have buckets, and so tiles, of their own.

Padding is whole spans that read and write the scratch block alone, which belongs to no sequence. No row
of the pass depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import pairwise

from engine.batch.span import Span
from engine.config import GraphConfig, SchedulerConfig, SpeculationConfig
from protos.messages import SpeculationMethod

_FINE_LIMIT = 128  # above it, sizes are a share of the power of two below apart
_FINE, _COARSE = 8, 4  # that share's divisor: of the usual passes, and of those with longer drafts


@dataclass(frozen=True, slots=True, order=True)
class GraphBucket:
    """Passes of up to `num_rows` rows, padded to so many, whose spans have up to `rows_per_span`."""

    num_rows: int
    rows_per_span: int


def sized(graphs: GraphConfig, scheduler: SchedulerConfig, speculation: SpeculationConfig) -> GraphConfig:
    """Return `graphs` with the sizes of an engine's decodes and verifications: 1 row per sequence, and K + 1."""
    return replace(
        graphs,
        batches=tuple(sorted({min(batch, scheduler.max_num_sequences) for batch in graphs.batches})),
        max_batch=min(max(graphs.batches, default=graphs.max_batch), scheduler.max_num_sequences),
        row_counts=tuple(_row_counts(speculation)),
        max_rows=scheduler.max_tokens_per_step,
        has_trees=speculation.tree_nodes > 0,
    )


def graph_buckets(graphs: GraphConfig) -> list[GraphBucket]:
    """Return the buckets to record, smallest first: decodes, and passes with drafts by their number of rows."""
    decodes = graphs.batches or row_sizes(graphs.max_batch)
    buckets = {GraphBucket(size, 1) for size in decodes if 1 in graphs.row_counts}
    batch = max(graphs.batches, default=graphs.max_batch)
    verifications = [num_rows for num_rows in graphs.row_counts if num_rows > 1]
    for shorter, longest in pairwise([1, *verifications]):
        # A pass of fewer rows has no span that is too long for the shorter bucket. Sizes of long drafts are also sizes
        # of short ones, so that the smallest bucket with room is the one with the lowest tiles too.
        products = {size * num_rows for size in graphs.batches for num_rows in graphs.row_counts}
        sizes = products or row_sizes(batch * longest, _FINE if shorter == 1 else _COARSE)
        buckets |= {GraphBucket(size, longest) for size in sizes if shorter < size <= batch * longest}
    return sorted(bucket for bucket in buckets if bucket.num_rows <= graphs.max_rows)


def row_sizes(limit: int, divisor: int = _FINE) -> tuple[int, ...]:
    """Return sizes up to `limit`: 1, 2, 4, then by 8, and above 128 by an eighth; coarse ones by 16 and a fourth."""
    sizes = [size for size in (1, 2, 4) if size < limit]
    size = step = _FINE_LIMIT // 2 // divisor
    while size < limit:
        sizes.append(size)
        size += step if size < _FINE_LIMIT else (1 << (size.bit_length() - 1)) // divisor
    return (*sizes, limit)


def _row_counts(speculation: SpeculationConfig) -> list[int]:
    """Return the rows per sequence of the passes to record: of no draft, K drafts, and the longest draft.

    A half and a fourth of the longest are recorded too, if they are at least twice K.
    """
    longest = speculation.num_tokens
    if speculation.adaptive:
        longest = max(longest, speculation.max_num_tokens)
    if speculation.method in (SpeculationMethod.SUFFIX, SpeculationMethod.HYBRID):
        longest = max(longest, speculation.free_draft_limit)
    longest = max(longest, speculation.tree_nodes)
    usual = max(1, speculation.num_tokens)
    halves = [longest >> halving for halving in (1, 2)]  # each with recordings of its own
    lengths = {0, speculation.num_tokens, longest, *(half for half in halves if half >= 2 * usual)}
    return sorted(length + 1 for length in lengths)


def fitting_bucket(spans: Seq[Span], buckets: Seq[GraphBucket]) -> GraphBucket | None:
    """Return the first of the sorted `buckets` that has room; None if none has."""
    counts = [len(span.token_ids) for span in spans]
    num_rows, longest = sum(counts), max(counts)
    fitting = (bucket for bucket in buckets if bucket.num_rows >= num_rows and bucket.rows_per_span >= longest)
    return next(fitting, None)


def pad(spans: Seq[Span], bucket: GraphBucket, scratch_block: int, block_size: int) -> list[Span]:
    """Return `spans` and more spans on the scratch block, up to the rows of `bucket`; all rows have logits."""
    padded = list(spans)
    num_missing = bucket.num_rows - sum([len(span.token_ids) for span in spans])
    for first in range(0, num_missing, block_size):
        num_rows = min(block_size, num_missing - first)
        padded.append(Span([0] * num_rows, 0, [scratch_block], num_rows))
    return padded


def max_spans(bucket: GraphBucket, max_batch: int, block_size: int) -> int:
    """Largest number of spans of a padded pass of up to `max_batch` sequences, including the padding's."""
    return min(bucket.num_rows, max_batch) + -(-bucket.num_rows // block_size)
