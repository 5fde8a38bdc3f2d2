"""Rows without finite logits: the model overflowed after that row's prefix.

Such a faulty row has no token. If the draft before it is rejected, the row does not matter: plain decoding would not
have computed it. If that draft is accepted, the target has no next token, and the sequence ends.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.verifier.verify_result import VerifyResult
from engine.verifier.verify_task import VerifyTask


def before_fault(task: VerifyTask, are_finite: Seq[bool]) -> VerifyTask:
    """Cut a prepared task's chain before the draft that its first faulty row would verify.

    Block verification verifies the drafts of a pass together, so drafts after the fault must be removed. The new length
    depends only on the drafts before the fault, so the result stays exact. In a tree each node is verified by itself.
    """
    row = _first_fault(range(len(task.rows)), task, are_finite)
    if row is None or task.is_tree:
        return task
    return task._replace(draft=task.draft.head(row), rows=task.rows[: row + 1])


def up_to_fault(task: VerifyTask, result: VerifyResult, are_finite: Seq[bool]) -> VerifyResult:
    """Cut a result before the token of its first faulty row.

    The drafts before it are committed. The next pass meets the fault in its first row, and the sequence ends.
    """
    fault = _first_fault([result.row_of(index) for index in range(len(result.token_ids))], task, are_finite)
    if fault is None:
        return result
    if fault == 0:
        return VerifyResult(result.token_ids[:1], 0, is_exact=result.is_exact, is_finite=False)
    return result._replace(token_ids=result.token_ids[:fault], num_accepted=fault - 1, path=result.path[: fault - 1])


def _first_fault(rows: Seq[int], task: VerifyTask, are_finite: Seq[bool]) -> int | None:
    """Return the index in `rows` of the task's first faulty row."""
    return next((index for index, row in enumerate(rows) if not are_finite[task.first_row + row]), None)
