"""Passes in which a row has no finite logits: the model has overflowed behind that row's prefix.

Such a row decides nothing. If the draft before it falls, nothing has happened: plain decoding would not have computed
it. If the draft stands, the target has no next token, and the sequence ends there.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.verifier.verify_result import VerifyResult
from engine.verifier.verify_task import VerifyTask


def before_fault(task: VerifyTask, are_finite: Seq[bool]) -> VerifyTask:
    """Return a prepared task whose chain ends before the draft that its first faulty row would judge.

    Block verification judges all drafts of a pass together, so those behind the fault must not be there. The length
    follows from the drafts before it alone, and any such length is exact. In a tree each node is judged by itself.
    """
    row = _first_fault(range(len(task.rows)), task, are_finite)
    if row is None or task.is_tree:
        return task
    return task._replace(draft=task.draft.head(row), rows=task.rows[: row + 1])


def up_to_fault(task: VerifyTask, result: VerifyResult, are_finite: Seq[bool]) -> VerifyResult:
    """Return what is left of a result in which a faulty row has a token.

    The drafts before it are committed, and the next pass meets the fault again, in its first row: then the sequence
    ends.
    """
    fault = _first_fault([result.row_of(index) for index in range(len(result.token_ids))], task, are_finite)
    if fault is None:
        return result
    if fault == 0:
        return VerifyResult(result.token_ids[:1], 0, is_exact=result.is_exact, is_finite=False)
    return result._replace(token_ids=result.token_ids[:fault], num_accepted=fault - 1, path=result.path[: fault - 1])


def _first_fault(rows: Seq[int], task: VerifyTask, are_finite: Seq[bool]) -> int | None:
    """Return the index of the first of the task's `rows` that is faulty."""
    return next((index for index, row in enumerate(rows) if not are_finite[task.first_row + row]), None)
