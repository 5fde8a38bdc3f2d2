"""Trials laid out over the rows of a step, for the verifiers that compare p with q."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from engine.draft import SparseDistribution
from engine.sampling.logits_row import LogitsRow
from engine.sampling.noise import Purpose, gumbel
from engine.sampling.sampler import row_keys
from engine.verifier import rejection_law as law
from engine.verifier.trial import Trial


@dataclass(frozen=True, slots=True)
class Placed:
    """A trial, where its rows begin in the scores, and the distribution of each of its drafts."""

    trial: Trial
    first_row: int
    proposals: tuple[SparseDistribution, ...]

    @property
    def rows(self) -> tuple[LogitsRow, ...]:
        """The rows that judge the drafts: row i judges draft i."""
        return self.trial.rows[: len(self.proposals)]


@dataclass(frozen=True, slots=True)
class DraftedProbs:
    """What target and draft thought of each drafted token of all trials, in order: `[n] float64` both."""

    target: Tensor
    draft: Tensor


def place(trials: Seq[Trial]) -> list[Placed]:
    """Trials whose rows follow each other in the scores, from row 0."""
    placed, first_row = [], 0
    for trial in trials:
        proposals = law.proposals_of(trial.task.draft)[: len(trial.draft_ids)]
        placed.append(Placed(trial, first_row, proposals))
        first_row += len(trial.rows)
    return placed


def drafted_probs(target_probs: Tensor, placed: Seq[Placed]) -> DraftedProbs:
    """P and q of every drafted token; `target_probs` are [R, V]."""
    row_ids = [each.first_row + i for each in placed for i in range(len(each.proposals))]
    draft_ids = [draft_id for each in placed for draft_id in each.trial.draft_ids]
    proposals = [proposal for each in placed for proposal in each.proposals]
    return DraftedProbs(
        law.target_probs_of(target_probs, row_ids, draft_ids),
        law.draft_probs_of(proposals, draft_ids).to(target_probs.device),
    )


def draw_final_tokens(
    target_probs: Tensor, placed: Seq[Placed], counts: Seq[int], scales: Seq[float] | None = None
) -> list[int]:
    """The recovered or bonus token of each trial after its `counts` accepted drafts, all drawn at once."""
    distributions = final_probs(target_probs, placed, counts, scales)
    return draw_tokens(distributions, [each.trial.rows[count] for each, count in zip(placed, counts, strict=True)])


def draw_tokens(distributions: Tensor, rows: Seq[LogitsRow]) -> list[int]:
    """A token from each of `distributions [n, V]`, which follow these rows; one of probability zero is never drawn."""
    noise = gumbel(row_keys(rows, Purpose.RESIDUAL, distributions.device), distributions.shape[1])
    return (distributions.log() + noise).argmax(dim=1).tolist()  # log 0 + noise = -inf


def final_probs(
    target_probs: Tensor, placed: Seq[Placed], counts: Seq[int], scales: Seq[float] | None = None
) -> Tensor:
    """The distribution of the token after the accepted drafts of each trial, `[trials, V]`: norm(max(0, scale p - q)).

    `scales` weigh the target's distributions p; without them they weigh 1. After the last draft q is 0 and the
    distribution is p itself.
    """
    pairs = list(zip(placed, counts, strict=True))
    row_ids = [law.final_row(each.first_row, count) for each, count in pairs]
    proposals = [law.final_proposal(each.proposals, count) for each, count in pairs]
    p = target_probs[row_ids]  # [trials, V]
    if scales is not None:
        p *= p.new_tensor(scales)[:, None]
    return law.recovered_probs(p, law.dense_probs(proposals, target_probs))
