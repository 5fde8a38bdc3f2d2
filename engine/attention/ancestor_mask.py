"""Ancestors of a draft tree's rows as one integer per row, which the Triton kernel reads in place of a mask.

A span's `parents` are the one source of a tree's visibility. torch adds a mask to scores
(`engine.attention.tree_mask`), the Triton kernel tests bits, and the kernels for processors read each node's path
(`engine.batch.draft.path_to`): each reader has the form that it can use without building another.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.batch.span import Span

_NUM_BITS = 64


def ancestor_masks(span: Span, window: int | None) -> list[int]:
    """One int64 per row of `span`: bit j is set if the row sees node j of the span's tree; 0 for a row before the tree.

    A node sees itself and its ancestors among the last `window` positions, all ancestors if None.
    """
    first_node = span.start - span.tree_start
    nodes = range(first_node, first_node + len(span.token_ids))
    return [_signed(_bits(span.parents, node, window)) if node >= 0 else 0 for node in nodes]


def _bits(parents: Seq[int], node: int, window: int | None) -> int:
    bits = num_seen = 0
    while node >= 0 and (window is None or num_seen < window):
        bits |= 1 << node
        num_seen += 1
        node = parents[node]
    return bits


def _signed(bits: int) -> int:
    """The int64 of the same 64 bits."""
    return bits - (1 << _NUM_BITS) if bits >> (_NUM_BITS - 1) else bits
