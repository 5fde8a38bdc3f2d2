"""Block verification (Sun et al., arXiv:2403.10444): the drafts of a pass are judged together, not one by one.

A draft that the target likes better than the draft did makes up for one before it that it likes less, so that draft i
stands with probability E[rho_i], the most that any rule can reach which sees only the distributions along the chain.
The residual after tau accepted drafts is norm(max(0, rho_tau p - q)). The formulas are in `block_law`.

Unlike rejection, how many drafts stand depends on all drafts of the pass and all their coins, also on those beyond what
is committed. Positions there are drafted and judged again by the next pass, which must know nothing of that: coins and
draft noise are keyed by the pass (`engine.sampling.sampler.pass_keys`), never by the position alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise

import torch
from torch import Tensor

from engine.sampling.noise import Purpose, uniform
from engine.sampling.sampler import Sampler, draft_lanes, pass_keys
from engine.verifier import block_law, rejection_law
from engine.verifier.placed import Placed, drafted_probs, draw_final_tokens, place
from engine.verifier.trial import Outcome, Trial


def verify_by_block(sampler: Sampler, scores: Tensor, trials: Seq[Trial]) -> list[Outcome]:
    """One outcome per trial; `scores [R, V]` are processed and lie in the order of the trials' rows."""
    target_probs = sampler.probs(scores, [row for trial in trials for row in trial.rows])  # [R, V]
    placed = place(trials)
    ratios = running_ratios(target_probs, placed)
    counts = [block_law.count_accepted(successes) for successes in _toss_coins(target_probs, placed, ratios)]
    scales = [rho[count] for rho, count in zip(ratios, counts, strict=True)]
    final_ids = draw_final_tokens(target_probs, placed, counts, scales)
    return [
        Outcome((*trial.draft_ids[:count], final_id), count)
        for trial, count, final_id in zip(trials, counts, final_ids, strict=True)
    ]


def running_ratios(target_probs: Tensor, placed: Seq[Placed]) -> list[list[float]]:
    """rho_0 to rho_K of each trial."""
    probs = drafted_probs(target_probs, placed)
    p, q = probs.target.tolist(), probs.draft.tolist()
    ends = [0]
    for each in placed:
        ends.append(ends[-1] + len(each.proposals))
    return [block_law.running_ratios(p[i:j], q[i:j]) for i, j in pairwise(ends)]


def _toss_coins(target_probs: Tensor, placed: Seq[Placed], ratios: Seq[Seq[float]]) -> list[list[bool]]:
    """Whether the coin of each draft lets it and all before it stand, per trial."""
    rows = [row for each in placed for row in each.rows]
    if not rows:
        return [[] for _ in placed]
    device = target_probs.device
    coins = uniform(pass_keys(rows, Purpose.ACCEPT, device), draft_lanes(rows, device))
    answers = iter(block_law.is_success(coins, success_probs(target_probs, placed, ratios)).tolist())
    return [[next(answers) for _ in each.proposals] for each in placed]


def success_probs(target_probs: Tensor, placed: Seq[Placed], ratios: Seq[Seq[float]]) -> Tensor:
    """h_1 to h_K of each trial, one after the other, `[n] float64`: what follows draft i is in row i + 1."""
    ends = [(each, i + 1) for each in placed for i in range(len(each.proposals))]
    row_ids = [rejection_law.final_row(each.first_row, count) for each, count in ends]
    proposals = [rejection_law.final_proposal(each.proposals, count) for each, count in ends]
    rho = torch.tensor([r for each in ratios for r in each[1:]], dtype=torch.float64, device=target_probs.device)
    return block_law.success_probs(rho, block_law.excess_mass(target_probs, row_ids, rho, proposals))
