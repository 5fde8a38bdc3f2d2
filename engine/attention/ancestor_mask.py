"""The keys that a row of a draft tree sees, in two forms: masks for torch, and bits for the Triton kernel.

Both follow from a span's `parents`. (Kernels for processors read each node's path, `engine.batch.draft.path_to`.) A row
sees the keys before the tree, its ancestors, and itself:

                keys    ..., committed | a  b  c  d          a, b follow the committed tokens, c and d follow a
row of c                 x   x       x | x     x
row of d                 x   x       x | x        x
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.batch.draft import depths
from engine.batch.span import Span


def hide_in_tree(is_hidden: Tensor, span: Span, steps: Seq[int], first_key: int, window: int | None) -> None:
    """Correct, in place, the mask that `span` would have as a chain: `is_hidden [Q, S] bool`, keys from `first_key` on.

    Row i is the span's row `steps[i]`. `window` is how many positions a row sees, its own included; None is all.
    """
    first = span.tree_start
    nodes = [span.start + step - first for step in steps]  # negative: a row before the tree, which is right already
    in_tree = [row for row, node in enumerate(nodes) if node >= 0]
    sees = ancestors(span.parents)[[nodes[row] for row in in_tree]]  # [rows in the tree, N]
    by_depth = torch.tensor(depths(span.parents))  # [N]
    row_depths = by_depth[[nodes[row] for row in in_tree]][:, None]
    hidden = is_hidden[in_tree]
    if window is not None:
        sees &= by_depth > row_depths - window
        oldest = first - 1 + row_depths - window  # the last position out of sight of each row
        hidden[:, : first - first_key] = (torch.arange(first_key, first) <= oldest).to(is_hidden.device)
    hidden[:, first - first_key : span.end - first_key] = (~sees).to(is_hidden.device)
    is_hidden[in_tree] = hidden


def ancestors(parents: Seq[int]) -> Tensor:
    """Return `[N, N] bool`: True if node j is node i or one of its ancestors."""
    found = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            found[node] |= found[parent]
    return found


def ancestor_masks(span: Span, window: int | None) -> list[int]:
    """Return an int64 per row of `span`: bit j is set if the row sees node j of the tree; 0 for a row before the tree.

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
    """Return the int64 with the same 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits
