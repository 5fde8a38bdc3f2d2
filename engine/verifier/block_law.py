"""The formulas of block verification (arXiv:2403.10444, algorithm 2): how many drafts stand, judged together.

All are pure. The verifier computes with exactly these functions, and the tests enumerate them. p is the target's
distribution and q the draft's, rho the running ratio, h the probability that a coin lets a draft and all before it
stand.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.draft import WEIGHT_SUM, SparseDistribution
from engine.verifier.rejection_law import target_probs_of


def running_ratios(target_probs: Seq[float], draft_probs: Seq[float]) -> list[float]:
    """rho_0 to rho_K: rho_0 = 1, rho_i = min(1, rho_{i-1} p_i(x_i) / q_i(x_i)).

    A draft may make up for an unlikely one before it, up to 1. After one that the target excludes all are 0.
    """
    ratios = [1.0]
    for p, q in zip(target_probs, draft_probs, strict=True):
        ratios.append(min(1.0, ratios[-1] * p / q) if p > 0 else 0.0)
    return ratios


def excess_mass(target_probs: Tensor, row_ids: Seq[int], ratios: Tensor, proposals: Seq[SparseDistribution]) -> Tensor:
    """S = sum over t of max(0, rho p(t) - q(t)) in each chosen row of `target_probs [R, V]`: `[n] float64`.

    It is rho minus what the two distributions share, and that takes only the few tokens of q.
    """
    entries = [
        (index, token_id, weight / WEIGHT_SUM)
        for index, proposal in enumerate(proposals)
        for token_id, weight in zip(proposal.token_ids, proposal.weights, strict=True)
    ]
    if not entries:
        return ratios
    indices, token_ids, weights = zip(*entries, strict=True)
    index = torch.tensor(indices, device=target_probs.device)
    p = target_probs_of(target_probs, [row_ids[i] for i in indices], token_ids)
    q = torch.tensor(weights, dtype=torch.float64, device=target_probs.device)
    shared = torch.zeros_like(ratios).index_add_(0, index, torch.minimum(ratios[index] * p, q))
    return (ratios - shared).clamp_(min=0)


def success_probs(ratios: Tensor, excess: Tensor) -> Tensor:
    """H = S / (S + 1 - rho), `[n] float64`; 1 where that is 0/0, which is where p and q agree.

    After the last draft no q competes: S is rho, and h is rho too.
    """
    total = excess + 1.0 - ratios
    return torch.where(total > 0, excess / total, 1.0)


def is_success(coins: Tensor, probs: Tensor) -> Tensor:
    """U < h, `[n] float64`, u in [0, 1). Strict: a coin of zero must not accept what is impossible."""
    return coins < probs


def count_accepted(successes: Seq[bool]) -> int:
    """All drafts up to the *last* success stand; a failure before it decides nothing."""
    return max((index + 1 for index, is_standing in enumerate(successes) if is_standing), default=0)
