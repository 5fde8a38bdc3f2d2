"""Coupled verification of a tree: run the ordinary sampler at every node and descend to the child that it sampled.

Each emitted token is the one plain decoding would have sampled there, as in `engine.verifier.coupled`, so the output
does not depend on the tree: wider or deeper ones only have a better chance to hold what comes.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from engine.sampling.sampler import Sampler
from engine.verifier.trial import Outcome, Trial


def verify_coupled_tree(sampler: Sampler, scores: Tensor, trials: Seq[Trial]) -> list[Outcome]:
    """One outcome per trial; `scores [R, V]` are processed and lie in the order of the trials' rows."""
    sampled_ids = iter(sampler.sample(scores, [row for trial in trials for row in trial.rows]).tolist())
    return [
        descend([next(sampled_ids) for _ in trial.rows], trial.draft_ids, trial.task.draft.parents) for trial in trials
    ]


def descend(sampled_ids: Seq[int], draft_ids: Seq[int], parents: Seq[int]) -> Outcome:
    """Emit what was sampled on the way down; `sampled_ids[0]` follows no node, `sampled_ids[node + 1]` follows `node`.

    Rows of nodes off the way were computed on prefixes that never came to be.
    """
    children: dict[tuple[int, int], int] = {}
    for node, (parent, draft_id) in enumerate(zip(parents, draft_ids, strict=False)):
        children.setdefault((parent, draft_id), node)
    path: list[int] = []
    emitted_ids = [sampled_ids[0]]
    place = (-1, emitted_ids[0])
    while place in children:
        path.append(children[place])
        emitted_ids.append(sampled_ids[path[-1] + 1])
        place = (path[-1], emitted_ids[-1])
    return Outcome(tuple(emitted_ids), len(path), tuple(path))
