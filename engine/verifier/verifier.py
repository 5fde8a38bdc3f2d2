"""The verifier of a step: one batched pass through the sampler, then a short walk per sequence.

Each sequence is verified in its own mode: coupled verification is here, the others are in `rejection` and `block`.
Greedy rows, sampled rows and rows of all modes share the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate, chain
from operator import itemgetter

import numpy as np
from torch import Tensor

from engine.native.library import are_finite
from engine.sampling.logits_row import LogprobQuery, RowBatch, token_logprobs
from engine.sampling.noise import limited_threads
from engine.sampling.sampler import Sampler
from engine.verifier.block import verify_by_block
from engine.verifier.rejection import verify_by_rejection, verify_tree_by_rejection
from engine.verifier.verify_task import IMPOSSIBLE_ID, VerifyResult, VerifyTask, prepare_all
from protos.messages import VerifyMode

_Rule = tuple[bool, VerifyMode]  # (is a tree, mode): tasks of one rule are verified together


class Verifier:
    """Turns the target's logits and the drafts of a step into committed tokens."""

    def __init__(self) -> None:
        self._sampler = Sampler()

    def verify(self, logits: Tensor, tasks: Seq[VerifyTask]) -> list[VerifyResult]:
        """Verify every task against its rows of `logits [R, V] float32`; return results in the order of the tasks.

        A task without drafts is plain decoding. The call changes no argument. Every prefix of a result has the target's
        distribution, so the caller may cut tokens after a stop token or a length limit.
        """
        # Tasks of one rule are next to each other, so that each rule is one batch.
        order, counts = _by_rule(tasks)
        prepared = prepare_all([tasks[index] for index in order], logits.shape[1])
        with limited_threads(logits):
            is_finite = are_finite(logits)
            are_all_finite = is_finite.all()  # issued now, so that a GPU has it when the host reads the tokens
            verified = self._verify_sorted(logits, prepared, counts)
            if not bool(are_all_finite):  # verify again, without the drafts after a faulty row
                flags = is_finite.tolist()
                cut = [before_fault(task, flags) for task in prepared]
                verified = self._verify_sorted(logits.where(is_finite[:, None], 0.0), cut, counts)
                verified = [up_to_fault(*pair, flags) for pair in zip(prepared, verified, strict=True)]
            if len(counts) > 1:
                verified = [result for _, result in sorted(zip(order, verified, strict=True), key=itemgetter(0))]
            return _with_logprobs(logits, tasks, verified)

    def draw(self, logits: Tensor, tasks: Seq[VerifyTask]) -> Tensor:
        """Sample the next token of coupled tasks without drafts, as `verify` does: `[tasks] int64`.

        The tokens stay on the device of the logits, and the host does not wait for them. A row without finite logits
        gets `IMPOSSIBLE_ID`.
        """
        prepared = prepare_all(tasks, logits.shape[1])
        rows = RowBatch([task.rows for task in prepared])
        selected = _select(logits, prepared, rows)
        return self._sampler.draw(selected, rows).where(are_finite(selected), IMPOSSIBLE_ID)

    def _verify_sorted(self, logits: Tensor, tasks: Seq[VerifyTask], counts: Mapping[_Rule, int]) -> list[VerifyResult]:
        """Verify prepared tasks in the order of their rules; `counts` has the number of tasks per rule."""
        rows = RowBatch([task.rows for task in tasks])
        logits = _select(logits, tasks, rows)
        results: list[VerifyResult] = []
        first_row = 0
        for (is_tree, mode), count in counts.items():
            members = tasks[len(results) : len(results) + count]
            assert not is_tree or mode in _VERIFY_TREE, f"{mode} verifies chains only: no tree is scheduled for it"
            verify = _VERIFY_TREE[mode] if is_tree else _VERIFY_CHAIN[mode]
            members_rows = rows if count == len(tasks) else RowBatch([task.rows for task in members])
            end_row = first_row + len(members_rows)
            results += verify(self._sampler, logits[first_row:end_row], members, members_rows)
            first_row = end_row
        return results


def _by_rule(tasks: Seq[VerifyTask]) -> tuple[Seq[int], Mapping[_Rule, int]]:
    """Return an order that groups the tasks by rule, and the number of tasks per rule."""
    rules = [(task.is_tree, task.mode) for task in tasks]
    if rules and rules.count(rules[0]) == len(rules):
        return range(len(rules)), {rules[0]: len(rules)}
    by_rule: dict[_Rule, list[int]] = {}
    for index, rule in enumerate(rules):
        by_rule.setdefault(rule, []).append(index)
    return [*chain.from_iterable(by_rule.values())], {rule: len(each) for rule, each in by_rule.items()}


def _select(logits: Tensor, tasks: Seq[VerifyTask], rows: RowBatch) -> Tensor:
    """Return the tasks' rows of the logits in the order of the tasks, without a copy if they are in that order."""
    first_rows = [task.first_row for task in tasks]
    if len(rows) == len(logits) and first_rows == sorted(first_rows):  # no two tasks share a row
        return logits
    return logits[[task.first_row + index for task in tasks for index in range(len(task.rows))]]


def _with_logprobs(logits: Tensor, tasks: Seq[VerifyTask], results: Seq[VerifyResult]) -> list[VerifyResult]:
    """Add the logprobs of every emitted token to the results of requests that want them."""
    if all(task.sequence.sampling.num_logprobs is None for task in tasks):
        return list(results)
    wanted = [_queries(task, result) for task, result in zip(tasks, results, strict=True)]
    answers = iter(token_logprobs(logits, [query for queries in wanted for query in queries]))
    return [
        result._replace(logprobs=tuple(next(answers) for _ in queries)) if queries else result
        for result, queries in zip(results, wanted, strict=True)
    ]


def _queries(task: VerifyTask, result: VerifyResult) -> list[LogprobQuery]:
    num_top = task.sequence.sampling.num_logprobs
    if num_top is None:
        return []
    first_row, token_ids = task.first_row, result.token_ids
    return [LogprobQuery(first_row + result.row_of(i), token_id, num_top) for i, token_id in enumerate(token_ids)]


# Rows without finite logits: the model overflowed after that row's prefix.
#
# Such a faulty row has no token. If the draft before it is rejected, the row does not matter: plain decoding would not
# have computed it. If that draft is accepted, the target has no next token, and the sequence ends.


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


# Coupled verification: run the ordinary sampler at every row, and accept drafts that equal the sampled tokens.
#
# The output is a function of prefix, seed and target logits, not of the draft: plain decoding samples the same token at
# each position with the same noise (Daliri, Musco, Suresh, arXiv:2408.07978). A wider or deeper tree only makes a match
# more likely.


def verify_coupled(sampler: Sampler, logits: Tensor, tasks: Seq[VerifyTask], rows: RowBatch) -> list[VerifyResult]:
    """Verify chains, or trees; `logits [R, V]` are in the order of `rows`, the rows of all tasks."""
    sampled_ids = sampler.draw(logits, rows).tolist()
    if not tasks[0].is_tree:
        return match(sampled_ids, [task.verified_ids for task in tasks])
    ends = list(accumulate(len(task.rows) for task in tasks))
    return [
        descend(sampled_ids[end - len(task.rows) : end], task.draft_ids, task.draft.parents)
        for task, end in zip(tasks, ends, strict=True)
    ]


def match(sampled_ids: Seq[int], chains: Seq[Seq[int]]) -> list[VerifyResult]:
    """Emit each chain's sampled tokens, up to and including the first that differs from its draft, or the bonus token.

    A chain has one row more than drafts. Rows after the first difference were computed on a wrong prefix and are
    ignored.
    """
    draft_ids: list[int] = []
    first_rows: list[int] = []
    for chain_ids in chains:
        first_rows.append(len(draft_ids))
        draft_ids += chain_ids
        draft_ids.append(IMPOSSIBLE_ID)  # so each chain has a row that differs
    different = np.flatnonzero(np.array(sampled_ids) != np.array(draft_ids))
    last_rows = different[np.searchsorted(different, first_rows)].tolist()
    return [
        VerifyResult(tuple(sampled_ids[first : last + 1]), last - first)
        for first, last in zip(first_rows, last_rows, strict=True)
    ]


def descend(sampled_ids: Seq[int], draft_ids: Seq[int], parents: Seq[int]) -> VerifyResult:
    """Walk down a tree along the sampled tokens, and emit them.

    `sampled_ids[0]` follows the committed tokens, and `sampled_ids[node + 1]` follows `node`. Rows off the path were
    computed on prefixes that are not committed.
    """
    children: dict[tuple[int, int], int] = {}
    for node, (parent, draft_id) in enumerate(zip(parents, draft_ids, strict=False)):
        children.setdefault((parent, draft_id), node)
    path: list[int] = []
    emitted_ids = [sampled_ids[0]]
    edge = (-1, emitted_ids[0])
    while edge in children:
        path.append(children[edge])
        emitted_ids.append(sampled_ids[path[-1] + 1])
        edge = (path[-1], emitted_ids[-1])
    return VerifyResult(tuple(emitted_ids), len(path), path=tuple(path))


_VERIFY_CHAIN = {
    VerifyMode.COUPLED: verify_coupled,
    VerifyMode.REJECTION: verify_by_rejection,
    VerifyMode.BLOCK: verify_by_block,
}
_VERIFY_TREE = {
    VerifyMode.COUPLED: verify_coupled,
    VerifyMode.REJECTION: verify_tree_by_rejection,
}
