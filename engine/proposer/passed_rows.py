"""The accepted rows of a verified pass and the token after each, which are a head's input."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.sequence.batch import Batch
from engine.sequence.sequence import Sequence
from engine.verifier.verify_result import VerifyResult


@dataclass(frozen=True, slots=True)
class PassedRows:
    """One sequence's accepted rows, at positions [start, start + len(rows)).

    `rows` has their indices in the T rows of the pass, which are not consecutive for a tree. `next_ids` has the token
    after each row. If the pass has sampled the sequence (`is_newest`), the last id is the newest token to be committed.
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
    """Return the accepted rows of each scheduled sequence; call it before the commit.

    `num_drafts` and `verified` have an entry per sampled sequence.
    """
    passed = []
    first_row = 0
    num_sampled = len(verified)
    for index, scheduled in enumerate(batch.scheduled):
        # The committed tokens of the pass, with the token after each.
        end_row = first_row + scheduled.num_tokens
        rows = list(range(first_row, end_row))
        known = scheduled.sequence.token_ids[scheduled.start + 1 : scheduled.start + scheduled.num_tokens + 1]
        # The accepted drafts of a sampled sequence come after them.
        if index < num_sampled:
            outcome = verified[index]
            path = outcome.path or range(outcome.num_accepted)
            rows += [end_row + node for node in path]
            end_row += num_drafts[index]
            known = [*known, *outcome.token_ids]
        passed.append(PassedRows(scheduled.sequence, scheduled.start, rows, known, index < num_sampled))
        first_row = end_row
    return passed
