"""The rows of a verified pass that stand, and the token behind each: all that a head learns from a pass."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.sequence.batch import Batch
from engine.sequence.sequence import Sequence
from engine.verifier.verify_result import VerifyResult


@dataclass(frozen=True, slots=True)
class PassedRows:
    """One sequence's rows that stand, at positions [start, start + len(rows)).

    `rows` are their indices among the T rows of the pass: not in order where a tree was accepted. `next_ids` has the
    token behind each; where the pass has sampled (`is_newest`), the last of them is the newest that will be committed.
    """

    sequence: Sequence
    start: int
    rows: Seq[int]
    next_ids: Seq[int]
    is_newest: bool

    @property
    def num_tokens(self) -> int:
        """Committed tokens up to the last of `next_ids`."""
        return self.start + len(self.rows) + 1


def passed_rows(batch: Batch, num_drafts: Seq[int], verified: Seq[VerifyResult]) -> list[PassedRows]:
    """Return those of each scheduled sequence; `num_drafts` has one per sampled one. Call it before the commit."""
    passed = []
    first_row = 0
    num_sampled = len(verified)
    for index, scheduled in enumerate(batch.scheduled):
        end_row = first_row + scheduled.num_tokens
        rows = list(range(first_row, end_row))
        known = scheduled.sequence.token_ids[scheduled.start + 1 : scheduled.start + scheduled.num_tokens + 1]
        if index < num_sampled:
            outcome = verified[index]
            path = outcome.path or range(outcome.num_accepted)
            rows += [end_row + node for node in path]
            end_row += num_drafts[index]
            known = [*known, *outcome.token_ids]
        passed.append(PassedRows(scheduled.sequence, scheduled.start, rows, known, index < num_sampled))
        first_row = end_row
    return passed
