"""Verification by rejection (arXiv:2211.17192, arXiv:2302.01318), with q sparse and in integer weights.

Draft x ~ q is accepted with probability min(1, p(x)/q(x)); the first that is not is replaced by a token from
norm(max(0, p - q)); when all stand, a bonus token comes from p of the last row. The emitted mass is min(p, q) +
max(0, p - q) = p. The formulas are in `rejection_law`; this file batches them over the sequences of a step.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from engine.sampling.noise import Purpose, uniform
from engine.sampling.sampler import Sampler, row_keys
from engine.verifier import rejection_law as law
from engine.verifier.placed import Placed, drafted_probs, draw_final_tokens, place
from engine.verifier.trial import Outcome, Trial


def verify_by_rejection(sampler: Sampler, scores: Tensor, trials: Seq[Trial]) -> list[Outcome]:
    """One outcome per trial; `scores [R, V]` are processed and lie in the order of the trials' rows."""
    target_probs = sampler.probs(scores, [row for trial in trials for row in trial.rows])  # [R, V]
    placed = place(trials)
    counts = [law.count_accepted(stands) for stands in _toss_coins(target_probs, placed)]
    final_ids = draw_final_tokens(target_probs, placed, counts)
    return [
        Outcome((*trial.draft_ids[:count], final_id), count)
        for trial, count, final_id in zip(trials, counts, final_ids, strict=True)
    ]


def _toss_coins(target_probs: Tensor, placed: Seq[Placed]) -> list[list[bool]]:
    """Whether each draft stands if all before it do, per trial."""
    rows = [row for each in placed for row in each.rows]
    if not rows:
        return [[] for _ in placed]
    probs = drafted_probs(target_probs, placed)
    coins = uniform(row_keys(rows, Purpose.ACCEPT, target_probs.device))
    answers = iter(law.is_accepted(coins, probs.target, probs.draft).tolist())
    return [[next(answers) for _ in each.proposals] for each in placed]
