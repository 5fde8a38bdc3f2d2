"""The chains of a step and their rows, for the verifiers that compare p with q."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate, islice
from typing import TypeVar

from torch import Tensor

from engine.sampling.logits_row import LogitsRow
from engine.sampling.noise import Purpose, gumbel
from engine.sampling.sampler import row_keys
from engine.verifier import rejection_rule
from engine.verifier.verify_task import VerifyResult, VerifyTask

Value = TypeVar("Value")


class ChainBatch:
    """The chains of prepared tasks, with p at their rows and q of their drafts.

    Args:
        target_probs: p, `[R, V]`, in the order of the tasks' rows.
        tasks: Prepared tasks whose drafts are chains.
    """

    def __init__(self, target_probs: Tensor, tasks: Seq[VerifyTask]) -> None:
        self.target_probs = target_probs
        self.tasks = tasks
        self.proposals = [rejection_rule.proposals_of(task.draft) for task in tasks]
        self.first_rows = [0, *accumulate(len(task.rows) for task in tasks)][:-1]

    @property
    def draft_rows(self) -> list[LogitsRow]:
        """The rows that verify the drafts: row i of a task verifies its draft i."""
        pairs = zip(self.tasks, self.proposals, strict=True)
        return [row for task, drafts in pairs for row in task.rows[: len(drafts)]]

    def by_task(self, values: Seq[Value]) -> list[list[Value]]:
        """Split values in the order of `draft_rows` into one list per task."""
        rest = iter(values)
        return [list(islice(rest, len(drafts))) for drafts in self.proposals]

    def drafted_probs(self) -> tuple[Tensor, Tensor]:
        """Return p and q of all drafted tokens, `[n] float64` each, in the order of `draft_rows`."""
        places = zip(self.first_rows, self.proposals, strict=True)
        row_ids = [first_row + i for first_row, drafts in places for i in range(len(drafts))]
        draft_ids = [draft_id for task in self.tasks for draft_id in task.draft_ids]
        p = rejection_rule.target_probs_of(self.target_probs, row_ids, draft_ids)
        q = rejection_rule.draft_probs_of([q for drafts in self.proposals for q in drafts], draft_ids)
        return p, q.to(p.device)

    def results(self, counts: Seq[int], scales: Seq[float] | None = None) -> list[VerifyResult]:
        """Draw all recovered and bonus tokens at once, and return the results for `counts` accepted drafts.

        `scales` goes to `final_probs`.
        """
        last_rows = [task.rows[count] for task, count in zip(self.tasks, counts, strict=True)]
        final_ids = draw_tokens(self.final_probs(counts, scales), last_rows)
        return [
            VerifyResult((*task.draft_ids[:count], final_id), count)
            for task, count, final_id in zip(self.tasks, counts, final_ids, strict=True)
        ]

    def final_probs(self, counts: Seq[int], scales: Seq[float] | None = None) -> Tensor:
        """Return norm(max(0, scale p - q)), `[tasks, V]`: the distribution of the token after the accepted drafts.

        Without `scales` each scale is 1. After the last draft q is 0, and the distribution is p itself.
        """
        places = list(zip(self.first_rows, self.proposals, counts, strict=True))
        row_ids = [rejection_rule.final_row(first_row, count) for first_row, _, count in places]
        p = self.target_probs[row_ids]  # [tasks, V]
        if scales is not None:
            p *= p.new_tensor(scales)[:, None]
        proposals = [rejection_rule.final_proposal(drafts, count) for _, drafts, count in places]
        return rejection_rule.recovered_probs(p, rejection_rule.dense_probs(proposals, self.target_probs))


def draw_tokens(probs: Tensor, rows: Seq[LogitsRow]) -> list[int]:
    """Draw a token from each of `probs [n, V]`, with the rows' noise; a token of probability 0 is never drawn."""
    noise = gumbel(row_keys(rows, Purpose.RESIDUAL, probs.device), probs.shape[1])
    return (probs.log() + noise).argmax(dim=1).tolist()  # log 0 + noise = -inf
