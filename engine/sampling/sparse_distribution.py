"""Drawing drafts from laws of integer weights, so that both sides of a rejection test hold the very same q.

A draft model's law is cut to its k likeliest tokens and rounded to weights that sum to 2**16 *before* the draw: the
rounded law is the proposal, and nothing is lost by sending it.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.draft import WEIGHT_SUM, SparseDistribution

WEIGHT_BITS = WEIGHT_SUM.bit_length() - 1


def quantize(probs: Tensor) -> Tensor:
    """Integer weights for the largest probabilities of each law, largest first: `[R, k]` floats -> `[R, k] int64`.

    They are scaled to sum to `WEIGHT_SUM`. A token of positive probability weighs at least 1, one of probability zero
    weighs 0; what rounding leaves goes to the first, and so does all of a law that allows no token.
    """
    is_live = probs > 0
    spare = WEIGHT_SUM - is_live.sum(dim=1, keepdim=True)  # what is left when each live token has one
    mass = probs.sum(dim=1, keepdim=True, dtype=torch.float64)
    weights = (probs / mass.clamp(min=1e-30) * spare).floor().long() + is_live.long()
    weights[:, 0] += WEIGHT_SUM - weights.sum(dim=1)
    return weights


def choose(weights: Tensor, bits: Tensor) -> Tensor:
    """The column each row draws: `weights [R, k]`, `bits [R]` uniform integers below `WEIGHT_SUM` -> `[R] int64`."""
    return (weights.cumsum(dim=1) <= bits[:, None]).sum(dim=1)


def sparse_distributions(token_ids: Tensor, weights: Tensor) -> list[SparseDistribution]:
    """The laws as plain data, without tokens of weight 0."""
    return [_sparse_law(ids, row) for ids, row in zip(token_ids.tolist(), weights.tolist(), strict=True)]


def _sparse_law(token_ids: Seq[int], weights: Seq[int]) -> SparseDistribution:
    live = [(token_id, weight) for token_id, weight in zip(token_ids, weights, strict=True) if weight > 0]
    return SparseDistribution(tuple(token_id for token_id, _ in live), tuple(weight for _, weight in live))


def is_consistent(law: SparseDistribution, token_id: int) -> bool:
    """Whether the law is one, and the token can be a draw from it; what another process sends may be neither."""
    return (
        len(law.token_ids) == len(law.weights)
        and len(set(law.token_ids)) == len(law.token_ids)
        and all(weight > 0 for weight in law.weights)
        and sum(law.weights) == WEIGHT_SUM
        and token_id in law.token_ids
    )


def one_hot(token_id: int) -> SparseDistribution:
    """The law of a draft that is a function of the prefix and of public noise."""
    return SparseDistribution((token_id,), (WEIGHT_SUM,))


def probability_of(law: SparseDistribution, token_id: int) -> float:
    return law.weights[law.token_ids.index(token_id)] / WEIGHT_SUM if token_id in law.token_ids else 0.0
