"""Coupled verification: run the ordinary sampler at every row, and accept drafts that equal the sampled tokens.

The output is a function of prefix, seed and target logits, not of the draft: plain decoding samples the same token at
each position with the same noise (Daliri, Musco, Suresh, arXiv:2408.07978). A wider or deeper tree only makes a match
more likely.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate

import numpy as np
from torch import Tensor

from engine.sampling.logits_row import RowBatch
from engine.sampling.sampler import Sampler
from engine.verifier.verify_task import IMPOSSIBLE_ID, VerifyResult, VerifyTask


def verify_coupled(sampler: Sampler, logits: Tensor, tasks: Seq[VerifyTask], rows: RowBatch) -> list[VerifyResult]:
    """Verify chains, or trees; `logits [R, V]` are in the order of `rows`, the rows of all tasks."""
    sampled_ids = sampler.draw(logits, rows).tolist()
    if not tasks[0].is_tree:
        return match(sampled_ids, [task.verified_ids for task in tasks])
    ends = list(accumulate(len(task.rows) for task in tasks))
    return [
        descend(sampled_ids[end - len(task.rows) : end], task.draft_ids, task.draft.parents)
        for task, end in zip(tasks, ends, strict=True)
    ]


def match(sampled_ids: Seq[int], chains: Seq[Seq[int]]) -> list[VerifyResult]:
    """Emit each chain's sampled tokens, up to and including the first that differs from its draft, or the bonus token.

    A chain has one row more than drafts. Rows after the first difference were computed on a wrong prefix and are
    ignored.
    """
    draft_ids: list[int] = []
    first_rows: list[int] = []
    for chain in chains:
        first_rows.append(len(draft_ids))
        draft_ids += chain
        draft_ids.append(IMPOSSIBLE_ID)  # so each chain has a row that differs
    different = np.flatnonzero(np.array(sampled_ids) != np.array(draft_ids))
    last_rows = different[np.searchsorted(different, first_rows)].tolist()
    return [
        VerifyResult(tuple(sampled_ids[first : last + 1]), last - first)
        for first, last in zip(first_rows, last_rows, strict=True)
    ]


def descend(sampled_ids: Seq[int], draft_ids: Seq[int], parents: Seq[int]) -> VerifyResult:
    """Walk down a tree along the sampled tokens, and emit them.

    `sampled_ids[0]` follows the committed tokens, and `sampled_ids[node + 1]` follows `node`. Rows off the path were
    computed on prefixes that are not committed.
    """
    children: dict[tuple[int, int], int] = {}
    for node, (parent, draft_id) in enumerate(zip(parents, draft_ids, strict=False)):
        children.setdefault((parent, draft_id), node)
    path: list[int] = []
    emitted_ids = [sampled_ids[0]]
    edge = (-1, emitted_ids[0])
    while edge in children:
        path.append(children[edge])
        emitted_ids.append(sampled_ids[path[-1] + 1])
        edge = (path[-1], emitted_ids[-1])
    return VerifyResult(tuple(emitted_ids), len(path), path=tuple(path))
