"""The verifier of a step: one batched pass through the sampler, then one short walk per sequence.

Each sequence is verified in its own mode; greedy and sampled rows and rows of all modes share the batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import groupby

from torch import Tensor

from engine.sampling.logprobs import LogprobQuery, token_logprobs
from engine.sampling.sampler import Sampler
from engine.verifier import VerifyResult, VerifyTask
from engine.verifier.block import verify_by_block
from engine.verifier.coupled import verify_coupled
from engine.verifier.rejection import verify_by_rejection
from engine.verifier.tree_coupled import verify_coupled_tree
from engine.verifier.tree_rejection import verify_tree_by_rejection
from engine.verifier.trial import Outcome, Trial, prepare
from protos.messages import VerifyMode

_VERIFY_CHAIN = {
    VerifyMode.COUPLED: verify_coupled,
    VerifyMode.REJECTION: verify_by_rejection,
    VerifyMode.BLOCK: verify_by_block,
}
_VERIFY_TREE = {
    VerifyMode.COUPLED: verify_coupled_tree,
    VerifyMode.REJECTION: verify_tree_by_rejection,
}


class Verifier:
    """Turns the target's logits and the drafts of a step into committed tokens."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def verify(self, logits: Tensor, tasks: Seq[VerifyTask]) -> list[VerifyResult]:
        """Verify every task against its rows of `logits [R, V] float32`; outcomes in the order of the tasks.

        A task without drafts is plain decoding. Nothing is changed. Every prefix of what is committed has the target's
        distribution, so the caller may cut off what lies beyond a stop token or a length limit.
        """
        trials = [prepare(task, logits.shape[1]) for task in tasks]
        order = sorted(range(len(trials)), key=lambda index: _rule(trials[index]))
        outcomes = dict(zip(order, self._outcomes(logits, [trials[index] for index in order]), strict=True))
        return _with_logprobs(logits, tasks, [outcomes[index] for index in range(len(tasks))])

    def draw(self, logits: Tensor, tasks: Seq[VerifyTask]) -> Tensor:
        """What `verify` commits for tasks without drafts that are verified by matching, `[tasks] int64`.

        The tokens stay on the device of the logits, and the host does not wait for them.
        """
        trials = [prepare(task, logits.shape[1]) for task in tasks]
        rows = [trial.rows[0] for trial in trials]
        return self._sampler.sample(self._sampler.apply_processors(_select(logits, trials), rows), rows)

    def _outcomes(self, logits: Tensor, trials: Seq[Trial]) -> list[Outcome]:
        """Outcomes of trials that are sorted by rule."""
        scores = self._sampler.apply_processors(
            _select(logits, trials), [row for trial in trials for row in trial.rows]
        )
        outcomes: list[Outcome] = []
        first_row = 0
        for (is_tree, mode), group in groupby(trials, key=_rule):
            members = list(group)
            verify = _VERIFY_TREE[mode] if is_tree else _VERIFY_CHAIN[mode]
            end_row = first_row + sum(len(trial.rows) for trial in members)
            outcomes += verify(self._sampler, scores[first_row:end_row], members)
            first_row = end_row
        return outcomes


def _rule(trial: Trial) -> tuple[bool, VerifyMode]:
    """What verifies a trial: trials of one rule are verified together."""
    return trial.is_tree, trial.mode


def _select(logits: Tensor, trials: Seq[Trial]) -> Tensor:
    """The rows of the trials, in their order; the logits themselves when that is what they are already."""
    row_ids = [trial.task.first_row + i for trial in trials for i in range(len(trial.rows))]
    return logits if row_ids == list(range(len(logits))) else logits[row_ids]


def _with_logprobs(logits: Tensor, tasks: Seq[VerifyTask], outcomes: Seq[Outcome]) -> list[VerifyResult]:
    """The outcomes, with the logprobs of every emitted token where its request wants them."""
    wanted = [_queries(task, outcome) for task, outcome in zip(tasks, outcomes, strict=True)]
    answers = iter(token_logprobs(logits, [query for queries in wanted for query in queries]))
    return [
        VerifyResult(outcome.token_ids, outcome.num_accepted, tuple(next(answers) for _ in queries), outcome.path)
        for outcome, queries in zip(outcomes, wanted, strict=True)
    ]


def _queries(task: VerifyTask, outcome: Outcome) -> list[LogprobQuery]:
    num_top = task.sequence.sampling.num_logprobs
    if num_top is None:
        return []
    first_row, token_ids = task.first_row, outcome.token_ids
    return [LogprobQuery(first_row + outcome.row_of(i), token_id, num_top) for i, token_id in enumerate(token_ids)]
