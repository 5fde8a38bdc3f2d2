"""Verification by rejection (arXiv:2211.17192, arXiv:2302.01318), with q sparse and in integer weights.

Draft x ~ q is accepted with probability min(1, p(x)/q(x)); the first that is not is replaced by a token from
norm(max(0, p - q)); when all stand, a bonus token comes from p of the last row. The emitted mass is min(p, q) +
max(0, p - q) = p. The formulas are in `rejection_law`; this file batches them over the sequences of a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from engine.draft import SparseLaw
from engine.noise import Purpose, gumbel, uniform
from engine.row import Row
from engine.sampler import Sampler, row_keys
from engine.verifier import rejection_law as law
from engine.verifier.trial import Outcome, Trial


@dataclass(frozen=True, slots=True)
class _Placed:
    """A trial, where its rows begin in the scores, and the law of each of its drafts."""

    trial: Trial
    first_row: int
    proposals: tuple[SparseLaw, ...]


def verify_by_rejection(sampler: Sampler, scores: Tensor, trials: Seq[Trial]) -> list[Outcome]:
    """One outcome per trial; `scores [R, V]` are processed and lie in the order of the trials' rows."""
    target_laws = sampler.law(scores, [row for trial in trials for row in trial.rows])  # [R, V]
    placed = list(_place(trials))
    counts = [law.count_accepted(accepted) for accepted in _toss_coins(target_laws, placed)]
    final_ids = _draw_final_tokens(target_laws, placed, counts)
    return [
        Outcome((*trial.draft_ids[:count], final_id), count)
        for trial, count, final_id in zip(trials, counts, final_ids, strict=True)
    ]


def _place(trials: Seq[Trial]) -> Iterator[_Placed]:
    first_row = 0
    for trial in trials:
        yield _Placed(trial, first_row, law.proposals_of(trial.task.draft)[: len(trial.draft_ids)])
        first_row += len(trial.rows)


def _toss_coins(target_laws: Tensor, placed: Seq[_Placed]) -> list[list[bool]]:
    """Whether each draft stands if all before it do, per trial. Draft i is judged by row i of its trial."""
    rows = [row for each in placed for row, _ in zip(each.trial.rows, each.trial.draft_ids, strict=False)]
    if not rows:
        return [[] for _ in placed]
    row_ids = [each.first_row + i for each in placed for i in range(len(each.proposals))]
    draft_ids = [draft_id for each in placed for draft_id in each.trial.draft_ids]
    proposals = [proposal for each in placed for proposal in each.proposals]
    stands = law.is_accepted(
        uniform(row_keys(rows, Purpose.ACCEPT, target_laws.device)),
        law.target_probs_of(target_laws, row_ids, draft_ids),
        law.draft_probs_of(proposals, draft_ids).to(target_laws.device),
    )
    answers = iter(stands.tolist())
    return [[next(answers) for _ in each.proposals] for each in placed]


def _draw_final_tokens(target_laws: Tensor, placed: Seq[_Placed], counts: Seq[int]) -> list[int]:
    """The recovered or bonus token of each trial, all drawn at once."""
    pairs = list(zip(placed, counts, strict=True))
    row_ids = [law.final_row(each.first_row, count) for each, count in pairs]
    proposals = [law.final_proposal(each.proposals, count) for each, count in pairs]
    laws = law.recovered_law(target_laws[row_ids], law.dense_laws(proposals, target_laws))  # [trials, V]
    rows = [each.trial.rows[count] for each, count in pairs]
    return _draw(laws, rows).tolist()


def _draw(laws: Tensor, rows: Seq[Row]) -> Tensor:
    """One token from each law, `[n, V]` -> `[n] int64`; probability zero is never drawn (log 0 + noise = -inf)."""
    noise = gumbel(row_keys(rows, Purpose.RESIDUAL, laws.device), laws.shape[1])
    return (laws.log() + noise).argmax(dim=1)
