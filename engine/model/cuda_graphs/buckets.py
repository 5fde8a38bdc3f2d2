"""Few buckets for many passes: small passes are padded to a bucket, so that a GPU can replay its recording.

      3 spans of a pass, 7 rows         bucket of 8 rows
      A A A B C C C               ->    A A A B C C C | .        the rest: a span on the scratch block

A bucket has a number of rows in all: 33 sequences, one of them with 4 drafts, take 37 rows, and not as many as 33
sequences with 4 drafts each. Padding is whole spans that read and write the scratch block alone, which belongs to no
sequence. No row of the pass depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from engine.batch.span import Span
from engine.config import GraphConfig, SchedulerConfig, SpeculationConfig
from protos.messages import SpeculationMethod

_STEP = 8  # between sizes up to _FINE_LIMIT; above it an eighth of the power of two below
_FINE_LIMIT = 128


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
        has_trees=speculation.tree is not None,
    )


def graph_buckets(graphs: GraphConfig) -> list[GraphBucket]:
    """Buckets to be recorded, smallest first: decodes, and passes with drafts by their rows in all."""
    longest = max(graphs.row_counts, default=0)
    decodes = graphs.batches or row_sizes(graphs.max_batch)
    verifications = {batch * num_rows for batch in graphs.batches for num_rows in graphs.row_counts}
    buckets = {GraphBucket(size, 1) for size in decodes if 1 in graphs.row_counts}
    if longest > 1:
        sizes = verifications or row_sizes(graphs.max_batch * longest)
        buckets |= {GraphBucket(size, longest) for size in sizes if size > 1}
    return sorted(bucket for bucket in buckets if bucket.num_rows <= graphs.max_rows)


def row_sizes(limit: int) -> tuple[int, ...]:
    """Sizes up to `limit`, it included: 1, 2, 4, then by 8, and above 128 by an eighth."""
    sizes = [size for size in (1, 2, 4) if size < limit]
    size = _STEP
    while size < limit:
        sizes.append(size)
        size += _STEP if size < _FINE_LIMIT else (1 << (size.bit_length() - 1)) // 8
    return (*sizes, limit)


def _row_counts(speculation: SpeculationConfig) -> list[int]:
    """Rows of a decode, and the largest number of a verification: K + 1, or a tree's rows."""
    longest = speculation.num_tokens
    if speculation.adaptive:
        longest = max(longest, speculation.max_num_tokens)
    if speculation.method in (SpeculationMethod.SUFFIX, SpeculationMethod.HYBRID):
        longest = max(longest, speculation.free_draft_limit)
    if speculation.tree is not None:
        longest = max(longest, speculation.tree.num_nodes)
    return sorted({1, speculation.num_tokens + 1, longest + 1})


def fitting_bucket(spans: Seq[Span], buckets: Seq[GraphBucket]) -> GraphBucket | None:
    """First of the sorted `buckets` that has room; None if none has."""
    counts = [len(span.token_ids) for span in spans]
    num_rows, longest = sum(counts), max(counts)
    fitting = (bucket for bucket in buckets if bucket.num_rows >= num_rows and bucket.rows_per_span >= longest)
    return next(fitting, None)


def pad(spans: Seq[Span], bucket: GraphBucket, scratch_block: int, block_size: int) -> list[Span]:
    """`spans`, and spans on the scratch block that fill the pass up to the rows of `bucket`. Logits of all rows."""
    padded = list(spans)
    num_missing = bucket.num_rows - sum([len(span.token_ids) for span in spans])
    for first in range(0, num_missing, block_size):
        num_rows = min(block_size, num_missing - first)
        padded.append(Span([0] * num_rows, 0, [scratch_block], num_rows))
    return padded


def max_spans(bucket: GraphBucket, max_batch: int, block_size: int) -> int:
    """Largest number of spans of a padded pass of up to `max_batch` sequences, including the padding's."""
    return min(bucket.num_rows, max_batch) + -(-bucket.num_rows // block_size)
