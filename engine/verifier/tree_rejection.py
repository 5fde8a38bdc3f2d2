"""Verification of a tree by rejection: from the top down, siblings in the order in which they were drawn.

The shape of the tree must not depend on the drawn tokens. The formulas are in `tree_law`; a tree without branches gives
what `rejection` gives for the chain.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.sampling.logits_row import LogitsRow
from engine.sampling.noise import Purpose, uniform
from engine.sampling.sampler import Sampler, row_keys
from engine.verifier import rejection_law, tree_law
from engine.verifier.placed import draw_tokens
from engine.verifier.tree_law import Sibling
from engine.verifier.trial import Outcome, Trial


@dataclass(frozen=True, slots=True)
class _Walk:
    """The nodes that stand, from the top down, and the distribution of the token after them, `[V]`."""

    path: tuple[int, ...]
    final_probs: Tensor


@dataclass(frozen=True, slots=True)
class _Verdict:
    """The child that stands, if one does, and otherwise the distribution of what takes their place, `[V]`."""

    node: int | None
    final_probs: Tensor


def verify_tree_by_rejection(sampler: Sampler, scores: Tensor, trials: Seq[Trial]) -> list[Outcome]:
    """One outcome per trial; `scores [R, V]` are processed and lie in the order of the trials' rows."""
    target_probs = sampler.probs(scores, [row for trial in trials for row in trial.rows])  # [R, V]
    by_trial = target_probs.split([len(trial.rows) for trial in trials])
    walks = [_walk(distributions, trial) for distributions, trial in zip(by_trial, trials, strict=True)]
    last_rows = [trial.rows[_row_after(walk.path)] for walk, trial in zip(walks, trials, strict=True)]
    final_ids = draw_tokens(torch.stack([walk.final_probs for walk in walks]), last_rows)
    return [
        Outcome((*trial.task.draft.path(_row_after(walk.path) - 1), final_id), len(walk.path), walk.path)
        for walk, trial, final_id in zip(walks, trials, final_ids, strict=True)
    ]


def _walk(target_probs: Tensor, trial: Trial) -> _Walk:
    """Descend while a child stands; `target_probs` are those of the trial's rows."""
    path: list[int] = []
    while True:
        row = _row_after(path)
        siblings = tree_law.siblings_of(trial.task.draft, row - 1)
        verdict = _judge(target_probs[row], siblings, _coins(trial.rows[row], len(siblings), target_probs.device))
        if verdict.node is None:
            return _Walk(tuple(path), verdict.final_probs)
        path.append(verdict.node)


def _judge(target_probs: Tensor, siblings: Seq[Sibling], coins: Tensor) -> _Verdict:
    for sibling, coin in zip(siblings, coins, strict=True):
        p = rejection_law.target_probs_of(target_probs[None], [0], [sibling.token_id])
        if bool(rejection_law.is_accepted(coin, p, p.new_tensor([sibling.draft_prob]))):
            return _Verdict(sibling.node, target_probs)
        target_probs = tree_law.residual(target_probs, sibling)
    return _Verdict(None, target_probs)


def _coins(row: LogitsRow, num_siblings: int, device: torch.device) -> Tensor:
    """A coin for each child that may follow a row, `[siblings] float64`; no other pass judges this position."""
    keys = row_keys([row], Purpose.ACCEPT, device).expand(num_siblings)
    return uniform(keys, torch.arange(num_siblings, device=device))


def _row_after(path: Seq[int]) -> int:
    return path[-1] + 1 if path else 0
