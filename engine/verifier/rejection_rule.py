"""The formulas of rejection verification: which drafts are accepted, and the distribution of the next token.

All functions are pure and take any floating dtype. The verifier uses exactly these functions, and the tests enumerate
them. p is the target's distribution and q the draft's, both after all sampling parameters.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.batch.draft import WEIGHT_SUM, Draft, SparseDistribution
from engine.sampling.sparse_distribution import is_consistent, one_hot, probability_of

NO_PROPOSAL = SparseDistribution((), ())


def proposals_of(draft: Draft) -> tuple[SparseDistribution, ...]:
    """Return the distribution q of each drafted token; one-hot for a token without a distribution.

    A distribution that excludes its own token is ignored: one-hot is exact for any token that was chosen without
    knowledge of the verifier's noise.
    """
    if len(draft.distributions) != len(draft.token_ids):
        return tuple(one_hot(token_id) for token_id in draft.token_ids)
    pairs = zip(draft.distributions, draft.token_ids, strict=True)
    return tuple(q if is_consistent(q, token_id) else one_hot(token_id) for q, token_id in pairs)


def target_probs_of(target_probs: Tensor, row_ids: Seq[int], token_ids: Seq[int]) -> Tensor:
    """Return p of one token in each chosen row of `target_probs [R, V]`: `[n] float64`; 0 outside the vocabulary."""
    rows = torch.tensor(row_ids, dtype=torch.int64, device=target_probs.device)
    ids = torch.tensor(token_ids, dtype=torch.int64, device=target_probs.device)
    is_known = (ids >= 0) & (ids < target_probs.shape[1])
    return torch.where(is_known, target_probs[rows, ids.clamp(0, target_probs.shape[1] - 1)].double(), 0.0)


def draft_probs_of(distributions: Seq[SparseDistribution], token_ids: Seq[int]) -> Tensor:
    """Return q of one token in each distribution: `[n] float64`."""
    pairs = zip(distributions, token_ids, strict=True)
    return torch.tensor([probability_of(q, token_id) for q, token_id in pairs], dtype=torch.float64)


def is_accepted(uniforms: Tensor, target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """True if u q(x) < p(x), all `[n] float64`, u in [0, 1). Strict: u = 0 must not accept p(x) = 0."""
    return uniforms * draft_probs < target_probs


def count_accepted(flags: Seq[bool]) -> int:
    """Count the drafts before the first rejected one; flags after it belong to a prefix that is not committed."""
    return next((index for index, is_accepted in enumerate(flags) if not is_accepted), len(flags))


def final_row(first_row: int, num_accepted: int) -> int:
    """Return the row of the recovered or bonus token: the row after the accepted drafts, not always the last row."""
    return first_row + num_accepted


def final_proposal(proposals: Seq[SparseDistribution], num_accepted: int) -> SparseDistribution:
    """Return q of the rejected draft; zero for a bonus token, so its residual is p."""
    return proposals[num_accepted] if num_accepted < len(proposals) else NO_PROPOSAL


def dense_probs(distributions: Seq[SparseDistribution], like: Tensor) -> Tensor:
    """Return probabilities `[n, V]`, dtype and V of `like [*, V]`; tokens outside the vocabulary are dropped."""
    entries = [
        (index, token_id, weight / WEIGHT_SUM)
        for index, distribution in enumerate(distributions)
        for token_id, weight in zip(distribution.token_ids, distribution.weights, strict=True)
        if 0 <= token_id < like.shape[1]
    ]
    probs = like.new_zeros(len(distributions), like.shape[1])
    if entries:
        index, token_ids, values = zip(*entries, strict=True)
        probs[list(index), list(token_ids)] = like.new_tensor(values)
    return probs


def recovered_probs(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Return norm(max(0, p - q)), `[n, V]`; p itself if rounding leaves no mass, as when p and q agree."""
    excess = (target_probs - draft_probs).clamp_(min=0)
    mass = excess.sum(dim=1, keepdim=True)
    return torch.where(mass > 0, excess / mass, target_probs)
