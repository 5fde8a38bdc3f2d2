"""A pass that is issued to the device and not yet verified."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from engine.kv_cache.compaction import KVMove, compaction
from engine.sequence.batch import Batch
from engine.sequence.checked_draft import CheckedDraft
from engine.verifier.verify_result import VerifyResult
from engine.verifier.verify_task import VerifyTask


@dataclass(frozen=True, slots=True)
class InFlightBatch:
    """A pass, with the state that its verification and commit need.

    `drafts` has one draft per sampled sequence. `logits` [R, V] float32 are the batch's rows, None if the batch is
    empty. If `is_ahead`, the pass was issued before the host had read its input tokens.
    """

    batch: Batch
    drafts: Seq[CheckedDraft]
    logits: Tensor | None
    is_ahead: bool = False

    @property
    def num_drafts(self) -> list[int]:
        """Computed drafts of each sampled sequence."""
        return [draft.num_valid for draft in self.drafts]

    def tasks(self) -> list[VerifyTask]:
        """Return the verifier's tasks, one for each sampled sequence."""
        tasks = []
        first_row = 0
        for scheduled, draft in zip(self.batch.sampled, self.drafts, strict=True):
            first_row += scheduled.num_scored_rows
            tasks.append(VerifyTask(scheduled.sequence, draft.draft, first_row))
            first_row += draft.num_valid + 1
        return tasks

    def compactions(self, verified: Seq[VerifyResult]) -> list[KVMove]:
        """Return the KV moves that make the accepted paths of trees contiguous, for all later passes."""
        pairs = zip(self.batch.sampled, verified, strict=True)
        moves = [
            compaction(each.sequence.block_table, each.draft_start, outcome.path)
            for each, outcome in pairs
            if outcome.path
        ]
        return [move for move in moves if move is not None]
