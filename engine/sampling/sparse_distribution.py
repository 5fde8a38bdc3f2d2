"""Draws drafts from distributions of integer weights, so that proposer and verifier have exactly the same q.

A draft model's distribution is cut to its k likeliest tokens and rounded to weights that sum to 2**16 *before* the
draw. The rounded distribution is the proposal, so sending it loses nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.batch.draft import WEIGHT_SUM, SparseDistribution

WEIGHT_BITS = WEIGHT_SUM.bit_length() - 1


def quantize(probs: Tensor) -> Tensor:
    """Return integer weights for the largest probabilities of each row, `[R, k]` floats -> `[R, k] int64`.

    Probabilities and weights are in descending order. Weights sum to `WEIGHT_SUM`. A token of positive probability
    weighs at least 1, a token of probability zero weighs 0. The first token gets the remainder of rounding, and the
    whole weight if no token has a positive probability.
    """
    is_live = probs > 0
    spare = WEIGHT_SUM - is_live.sum(dim=1, keepdim=True)  # weight left after each live token gets 1
    mass = probs.sum(dim=1, keepdim=True, dtype=torch.float64)
    weights = (probs / mass.clamp(min=1e-30) * spare).floor().long() + is_live.long()
    weights[:, 0] += WEIGHT_SUM - weights.sum(dim=1)
    return weights


def choose(weights: Tensor, bits: Tensor) -> Tensor:
    """Return the column that each row draws, `[R] int64`.

    Args:
        weights: `[R, k]`.
        bits: `[R]`, uniform integers below `WEIGHT_SUM`.
    """
    return (weights.cumsum(dim=1) <= bits[:, None]).sum(dim=1)


def sparse_distributions(token_ids: Tensor, weights: Tensor) -> list[SparseDistribution]:
    """Return the distributions as plain data, without tokens of weight 0."""
    return [_sparse_distribution(ids, row) for ids, row in zip(token_ids.tolist(), weights.tolist(), strict=True)]


def _sparse_distribution(token_ids: Seq[int], weights: Seq[int]) -> SparseDistribution:
    live = [(token_id, weight) for token_id, weight in zip(token_ids, weights, strict=True) if weight > 0]
    return SparseDistribution(tuple(token_id for token_id, _ in live), tuple(weight for _, weight in live))


def is_consistent(q: SparseDistribution, token_id: int) -> bool:
    """True if the weights are a distribution and the token is a possible draw. Checks data from another process."""
    return (
        len(q.token_ids) == len(q.weights)
        and len(set(q.token_ids)) == len(q.token_ids)
        and all(weight > 0 for weight in q.weights)
        and sum(q.weights) == WEIGHT_SUM
        and token_id in q.token_ids
    )


def one_hot(token_id: int) -> SparseDistribution:
    """Return the distribution of a draft that is determined by the prefix and public noise."""
    return SparseDistribution((token_id,), (WEIGHT_SUM,))


def probability_of(q: SparseDistribution, token_id: int) -> float:
    """Return q(token), 0 for a token that is not listed."""
    return q.weights[q.token_ids.index(token_id)] / WEIGHT_SUM if token_id in q.token_ids else 0.0
