"""Block verification (Sun et al., arXiv:2403.10444): verifies the drafts of a pass together, not one by one.

A draft with p > q compensates for an earlier one with p < q. Draft i is accepted with probability E[rho_i], the most
that any rule can reach if it sees only the distributions along the chain. The residual after tau accepted drafts is
norm(max(0, rho_tau p - q)).

Unlike rejection, the number of accepted drafts depends on all drafts of the pass and on all their uniform numbers, even
after the committed tokens. The next pass drafts and verifies those positions again, and must be independent of this
one: uniforms and draft noise are keyed by the pass (`engine.sampling.sampler.pass_keys`), never by the position alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.batch.draft import WEIGHT_SUM, SparseDistribution
from engine.sampling.logits_row import RowBatch
from engine.sampling.noise import Purpose, uniform
from engine.sampling.sampler import Sampler, draft_lanes, pass_keys
from engine.verifier import rejection_rule
from engine.verifier.rejection import ChainBatch
from engine.verifier.verify_task import VerifyResult, VerifyTask


def verify_by_block(sampler: Sampler, logits: Tensor, tasks: Seq[VerifyTask], rows: RowBatch) -> list[VerifyResult]:
    """Verify chains; `logits [R, V]` are in the order of the tasks' rows."""
    chains = ChainBatch(sampler.probs(sampler.apply_processors(logits, rows), rows), tasks)
    ratios = chain_ratios(chains)
    counts = [count_accepted(successes) for successes in _accept_flags(chains, ratios)]
    return chains.results(counts, [rho[count] for rho, count in zip(ratios, counts, strict=True)])


def chain_ratios(chains: ChainBatch) -> list[list[float]]:
    """Return rho_0 to rho_K of each task."""
    p, q = (chains.by_task(probs.tolist()) for probs in chains.drafted_probs())
    return [running_ratios(*pair) for pair in zip(p, q, strict=True)]


def _accept_flags(chains: ChainBatch, ratios: Seq[Seq[float]]) -> list[list[bool]]:
    """Return per task, for each draft, if its uniform number accepts it and all drafts before it."""
    rows = chains.draft_rows
    if not rows:
        return [[] for _ in chains.tasks]
    device = chains.target_probs.device
    uniforms = uniform(pass_keys(rows, Purpose.ACCEPT, device), draft_lanes(rows, device))
    return chains.by_task(is_success(uniforms, chain_success_probs(chains, ratios)).tolist())


def chain_success_probs(chains: ChainBatch, ratios: Seq[Seq[float]]) -> Tensor:
    """Return h_1 to h_K of each task in one tensor, `[n] float64`; row i + 1 has the distribution after draft i."""
    places = zip(chains.first_rows, chains.proposals, strict=True)
    ends = [(first_row, drafts, i + 1) for first_row, drafts in places for i in range(len(drafts))]
    row_ids = [rejection_rule.final_row(first_row, count) for first_row, _, count in ends]
    proposals = [rejection_rule.final_proposal(drafts, count) for _, drafts, count in ends]
    rho = torch.tensor([r for each in ratios for r in each[1:]], dtype=torch.float64, device=chains.target_probs.device)
    return success_probs(rho, excess_mass(chains.target_probs, row_ids, rho, proposals))


# ---- the formulas (algorithm 2), which the tests enumerate --------------------------------------------------------
# p is the target's distribution, q the draft's, rho the running ratio, and h the probability of accepting a draft with
# all drafts before it.


def running_ratios(target_probs: Seq[float], draft_probs: Seq[float]) -> list[float]:
    """Return rho_0 to rho_K: rho_0 = 1, rho_i = min(1, rho_{i-1} p_i(x_i) / q_i(x_i)).

    A likely draft may compensate for an unlikely one before it, up to 1. After a draft with p = 0 all ratios are 0.
    """
    ratios = [1.0]
    for p, q in zip(target_probs, draft_probs, strict=True):
        ratios.append(min(1.0, ratios[-1] * p / q) if p > 0 else 0.0)
    return ratios


def excess_mass(target_probs: Tensor, row_ids: Seq[int], ratios: Tensor, proposals: Seq[SparseDistribution]) -> Tensor:
    """Return S = sum over t of max(0, rho p(t) - q(t)) in each chosen row of `target_probs [R, V]`: `[n] float64`.

    S is rho minus the mass that rho p and q share, which only needs the few tokens of q.
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
    p = rejection_rule.target_probs_of(target_probs, [row_ids[i] for i in indices], token_ids)
    q = torch.tensor(weights, dtype=torch.float64, device=target_probs.device)
    common = torch.zeros_like(ratios).index_add_(0, index, torch.minimum(ratios[index] * p, q))
    return (ratios - common).clamp_(min=0)


def success_probs(ratios: Tensor, excess: Tensor) -> Tensor:
    """Return H = S / (S + 1 - rho), `[n] float64`; 1 for 0/0, where p and q agree.

    After the last draft there is no q: S is rho, and h is rho too.
    """
    total = excess + 1.0 - ratios
    return torch.where(total > 0, excess / total, 1.0)


def is_success(uniforms: Tensor, probs: Tensor) -> Tensor:
    """True if u < h, `[n] float64`, u in [0, 1). Strict: u = 0 must not accept a draft with p = 0."""
    return uniforms < probs


def count_accepted(successes: Seq[bool]) -> int:
    """Count the drafts up to the *last* success; failures before it do not matter."""
    return max((index + 1 for index, is_accepted in enumerate(successes) if is_accepted), default=0)
