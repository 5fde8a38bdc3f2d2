"""One sequence's verification: its draft, the rows of the target's logits that verify it, and the result."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import chain
from typing import NamedTuple

from engine.batch.draft import Draft
from engine.sampling.grammar import TokenMask
from engine.sampling.logits_row import ChainRows, LogitsRow
from engine.sequence.batch import num_known
from engine.sequence.sequence import Sequence
from protos.messages import TokenLogprobs, VerifyMode

IMPOSSIBLE_ID = -1  # equals no sampled token and has probability 0


class VerifyTask(NamedTuple):
    """One sequence's rows of the step's logits, from `first_row`: after the committed tokens, then after each draft.

    The rows may end before the first draft that is outside the vocabulary, which no model can compute, or that the
    sequence's grammar forbids. If that draft was drawn from a distribution, it must stay in the task: rejection and
    block verification treat it as rejected, not as absent.

    The verifier fills in `rows` (`prepare_all`). `rows[0]` follows the committed tokens. `rows[i + 1]` follows draft i
    and the drafts before it in the chain, or above it in the tree.
    """

    sequence: Sequence
    draft: Draft
    first_row: int
    rows: Seq[LogitsRow] = ()

    @property
    def mode(self) -> VerifyMode:
        """The rule that verifies the task; a greedy sequence is always verified by matching."""
        return VerifyMode.COUPLED if self.sequence.is_matched else self.sequence.verify

    @property
    def is_tree(self) -> bool:
        return bool(self.draft.parents)

    @property
    def verified_ids(self) -> tuple[int, ...]:
        """The drafts of a prepared task that are followed by a row."""
        return self.draft.token_ids[: len(self.rows) - 1]

    @property
    def draft_ids(self) -> tuple[int, ...]:
        """The drafts of a prepared task; `IMPOSSIBLE_ID` replaces a last draft that is not followed by a row."""
        ids = self.draft.token_ids
        return ids if len(ids) < len(self.rows) else (*ids[:-1], IMPOSSIBLE_ID)


def prepare_all(tasks: Seq[VerifyTask], vocab_size: int) -> list[VerifyTask]:
    """Return the tasks with their rows, and with their drafts cut at the first impossible token.

    A draft ends with the first token that is outside the vocabulary or, in a chain, that the grammar forbids. That
    token cannot be accepted and is not followed by a row, so a task has one row more than valid drafts.
    """
    draft_ids = [*chain.from_iterable([task.draft.token_ids for task in tasks])]
    are_known = num_known(draft_ids, vocab_size) == len(draft_ids)
    prepared = []
    for task in tasks:
        sequence, draft, first_row, _ = task
        if sequence.matcher is not None or draft.parents:
            prepared.append(_with_rows(task, vocab_size))
            continue
        ids = draft.token_ids
        first = LogitsRow(
            sequence.sampling, sequence.token_ids, sequence.num_prompt_tokens, sequence.request.sample_index
        )
        if not are_known:
            num_valid = num_known(ids, vocab_size)
            draft, ids = draft.head(num_valid + 1), ids[:num_valid]
        prepared.append(VerifyTask(sequence, draft, first_row, ChainRows(first, ids)))
    return prepared


def _with_rows(task: VerifyTask, vocab_size: int) -> VerifyTask:
    """Prepare a tree, or a draft under a grammar, whose rows have their own masks."""
    ids = task.draft.token_ids
    sequence, matcher = task.sequence, task.sequence.matcher
    num_valid = num_known(ids, vocab_size)
    sampling, token_ids, num_prompt_tokens = sequence.sampling, sequence.token_ids, sequence.num_prompt_tokens
    sample_index = sequence.request.sample_index
    masks: Seq[TokenMask | None] = [None] * (num_valid + 1)
    if matcher is not None and task.is_tree:
        masks = [matcher.mask_after(task.draft.path(node)) for node in range(-1, num_valid)]
    elif matcher is not None:
        num_valid = matcher.num_allowed(ids[:num_valid])
        masks = matcher.masks(ids[:num_valid])
    paths = [task.draft.path(node) for node in range(-1, num_valid)] if task.is_tree else _heads(ids, num_valid)
    rows = tuple(
        LogitsRow(sampling, token_ids, num_prompt_tokens, sample_index, path, mask)
        for path, mask in zip(paths, masks, strict=True)
    )
    return VerifyTask(sequence, task.draft.head(num_valid + 1), task.first_row, rows)


def _heads(ids: tuple[int, ...], num_valid: int) -> list[tuple[int, ...]]:
    """Return the drafts before each row of a chain: none, then one more per row."""
    return [ids[:count] for count in range(num_valid + 1)]


class VerifyResult(NamedTuple):
    """The result for one sequence: `token_ids` holds the accepted tokens, then the recovered or bonus token.

    `path` has the accepted nodes of a tree, from the top down. It is empty for a chain, whose first `num_accepted`
    drafts are accepted. If `is_finite` is False, the row has no finite logits and the token in `token_ids` must not be
    committed. If `is_exact` is False, a reasoning step was scored (`engine.approximate`): the result does not count as
    acceptance of drafts.
    """

    token_ids: tuple[int, ...]
    num_accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    path: tuple[int, ...] = ()
    is_exact: bool = True
    is_finite: bool = True

    def row_of(self, index: int) -> int:
        """Return the row of token `index`, counted from the task's first row."""
        return self.path[index - 1] + 1 if self.path and index > 0 else index
