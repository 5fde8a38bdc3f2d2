"""Few buckets for many passes: small ones are padded to a bucket, so that a GPU can replay what it has recorded.

      3 spans of a pass, 7 rows         bucket of 4 spans x 3 rows: 12 rows
      A A A B C C C               ->    A A A B C C C | . . .  . .        the rest: spans on the scratch block

Padding is whole spans that read and write the scratch block alone, which belongs to no sequence. No row of the pass
depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from engine.config import GraphConfig, SchedulerConfig, SpeculationConfig
from engine.span import Span
from protos.messages import SpeculationMethod


@dataclass(frozen=True, slots=True, order=True)
class GraphBucket:
    """Passes of up to `num_spans` spans with up to `rows_per_span` rows each, padded to so many rows."""

    num_spans: int
    rows_per_span: int

    @property
    def num_rows(self) -> int:
        return self.num_spans * self.rows_per_span


def sized(graphs: GraphConfig, scheduler: SchedulerConfig, speculation: SpeculationConfig) -> GraphConfig:
    """Return `graphs` with the sizes of an engine's decodes and verifications: 1 row per sequence, and K + 1."""
    return replace(
        graphs,
        batches=tuple(sorted({min(batch, scheduler.max_num_sequences) for batch in graphs.batches})),
        row_counts=tuple(_row_counts(speculation)),
        max_rows=scheduler.max_tokens_per_step,
        has_trees=speculation.tree is not None,
    )


def graph_buckets(graphs: GraphConfig) -> list[GraphBucket]:
    """Buckets to be recorded, smallest first."""
    buckets = [GraphBucket(batch, num_rows) for batch in graphs.batches for num_rows in graphs.row_counts]
    return sorted(
        (bucket for bucket in buckets if bucket.num_rows <= graphs.max_rows),
        key=lambda bucket: (bucket.num_rows, bucket),
    )


def _row_counts(speculation: SpeculationConfig) -> list[int]:
    """Rows of a verification: K + 1, those of a tree, and steps between where passes differ in length."""
    counts = {1, speculation.num_tokens + 1}
    if speculation.tree is not None:
        counts.add(speculation.tree.num_nodes + 1)
    if longest := _longest_of_many(speculation):
        counts |= {1 << power for power in range(1, longest.bit_length())}
        counts.add(longest + 1)
    return sorted(counts)


def _longest_of_many(speculation: SpeculationConfig) -> int:
    """Largest number of drafts of a pass if all lengths up to it are usual; 0 if passes have K."""
    if speculation.adaptive:
        return speculation.max_num_tokens
    has_guesses = speculation.method in (SpeculationMethod.SUFFIX, SpeculationMethod.HYBRID)
    return speculation.guess_limit if has_guesses else 0


def fitting_bucket(spans: Seq[Span], buckets: Seq[GraphBucket]) -> GraphBucket | None:
    """First of the sorted `buckets` that has room; None if none has."""
    num_rows = max(len(span.token_ids) for span in spans)
    fitting = (bucket for bucket in buckets if bucket.num_spans >= len(spans) and bucket.rows_per_span >= num_rows)
    return next(fitting, None)


def pad(spans: Seq[Span], bucket: GraphBucket, scratch_block: int, block_size: int) -> list[Span]:
    """`spans`, and spans on the scratch block that fill the pass up to the rows of `bucket`. Logits of all rows."""
    padded = list(spans)
    num_missing = bucket.num_rows - sum(len(span.token_ids) for span in spans)
    max_rows = padding_rows(bucket, block_size)
    for first in range(0, num_missing, max_rows):
        num_rows = min(max_rows, num_missing - first)
        padded.append(Span([0] * num_rows, 0, [scratch_block], num_rows))
    return padded


def padding_rows(bucket: GraphBucket, block_size: int) -> int:
    """Rows of the longest span of padding: it lies within one block."""
    return min(bucket.rows_per_span, block_size)


def max_spans(bucket: GraphBucket, block_size: int) -> int:
    """Largest number of spans of a padded pass, those of the padding included."""
    return bucket.num_spans + -(-bucket.num_rows // padding_rows(bucket, block_size))
