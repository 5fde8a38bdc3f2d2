"""The verifier of a step: one batched pass through the sampler, then one short walk per sequence.

Each sequence is verified in its own mode; greedy and sampled rows and rows of all modes share the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import itemgetter

from torch import Tensor

from engine.sampling.logits_row import RowBatch
from engine.sampling.logprobs import LogprobQuery, token_logprobs
from engine.sampling.sampler import Sampler
from engine.sampling.thread_limit import limited_threads
from engine.sampling.vocabulary import Vocabulary
from engine.verifier.block import verify_by_block
from engine.verifier.coupled import verify_coupled
from engine.verifier.rejection import verify_by_rejection, verify_tree_by_rejection
from engine.verifier.verify_result import VerifyResult
from engine.verifier.verify_task import VerifyTask, prepare
from protos.messages import VerifyMode

_Rule = tuple[bool, VerifyMode]  # of trees or of chains: tasks of one rule are verified together
_VERIFY_CHAIN = {
    VerifyMode.COUPLED: verify_coupled,
    VerifyMode.REJECTION: verify_by_rejection,
    VerifyMode.BLOCK: verify_by_block,
}
_VERIFY_TREE = {
    VerifyMode.COUPLED: verify_coupled,
    VerifyMode.REJECTION: verify_tree_by_rejection,
}


class Verifier:
    """Turns the target's logits and the drafts of a step into committed tokens."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def verify(self, logits: Tensor, tasks: Seq[VerifyTask]) -> list[VerifyResult]:
        """Verify every task against its rows of `logits [R, V] float32`; results in the order of the tasks.

        A task without drafts is plain decoding. Nothing is changed. Every prefix of what is committed has the target's
        distribution, so the caller may cut off what lies beyond a stop token or a length limit.
        """
        by_rule: dict[_Rule, list[int]] = {}
        for index, task in enumerate(tasks):
            by_rule.setdefault((task.is_tree, task.mode), []).append(index)
        order = [index for members in by_rule.values() for index in members]
        vocabulary = Vocabulary(logits.shape[1])
        prepared = [prepare(tasks[index], vocabulary) for index in order]
        with limited_threads(logits):
            verified = self._verify_sorted(logits, prepared, {rule: len(each) for rule, each in by_rule.items()})
            if len(by_rule) > 1:
                verified = [result for _, result in sorted(zip(order, verified, strict=True), key=itemgetter(0))]
            return _with_logprobs(logits, tasks, verified)

    def draw(self, logits: Tensor, tasks: Seq[VerifyTask]) -> Tensor:
        """Return what `verify` commits for tasks without drafts that are verified by matching, `[tasks] int64`.

        The tokens stay on the device of the logits, and the host does not wait for them.
        """
        vocabulary = Vocabulary(logits.shape[1])
        prepared = [prepare(task, vocabulary) for task in tasks]
        rows = [task.rows[0] for task in prepared]
        return self._sampler.draw(_select(logits, prepared), rows)

    def _verify_sorted(self, logits: Tensor, tasks: Seq[VerifyTask], counts: Mapping[_Rule, int]) -> list[VerifyResult]:
        """Verify prepared tasks, those of one rule after another: `counts` of each."""
        logits = _select(logits, tasks)
        results: list[VerifyResult] = []
        first_row = 0
        for (is_tree, mode), count in counts.items():
            members = tasks[len(results) : len(results) + count]
            assert not is_tree or mode in _VERIFY_TREE, f"{mode} judges chains: no tree is scheduled for it"
            verify = _VERIFY_TREE[mode] if is_tree else _VERIFY_CHAIN[mode]
            rows = RowBatch([task.rows for task in members])
            end_row = first_row + len(rows)
            results += verify(self._sampler, logits[first_row:end_row], members, rows)
            first_row = end_row
        return results


def _select(logits: Tensor, tasks: Seq[VerifyTask]) -> Tensor:
    """Return the rows of the tasks, in their order; the logits themselves when that is what they are already."""
    num_rows = [len(task.rows) for task in tasks]
    if [task.first_row for task in tasks] == [0, *accumulate(num_rows[:-1])] and sum(num_rows) == len(logits):
        return logits
    return logits[[task.first_row + i for task, count in zip(tasks, num_rows, strict=True) for i in range(count)]]


def _with_logprobs(logits: Tensor, tasks: Seq[VerifyTask], results: Seq[VerifyResult]) -> list[VerifyResult]:
    """Return the results with the logprobs of every emitted token where its request wants them."""
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
