"""One sequence's verification inside the verifier's batch, and how it came out."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from engine.sampling.grammar import TokenMask
from engine.sampling.logits_row import LogitsRow
from engine.verifier import VerifyTask
from protos.messages import VerifyMode

IMPOSSIBLE_ID = -1  # equals no sampled token and has probability 0


@dataclass(frozen=True, slots=True)
class Trial:
    """A task made ready: its drafts, and the rows that can matter.

    `draft_ids` end with `IMPOSSIBLE_ID` where the first draft was that is outside the vocabulary or, in a chain, that
    the grammar forbids, if there is one: it cannot be accepted, so what follows it is left out, of the task's draft
    too. `rows[0]` is judged after the committed tokens, `rows[i + 1]` after draft i and those before it in the chain,
    or above it in the tree; there is one row more than valid drafts.
    """

    task: VerifyTask
    draft_ids: tuple[int, ...]
    rows: tuple[LogitsRow, ...]

    @property
    def mode(self) -> VerifyMode:
        """How the task is verified; a greedy one always by matching."""
        return VerifyMode.COUPLED if self.task.sequence.is_matched else self.task.sequence.verify

    @property
    def is_tree(self) -> bool:
        return bool(self.task.draft.parents)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The committed tokens: `num_accepted` drafts, then the recovered or bonus token; `path` as in `VerifyResult`."""

    token_ids: tuple[int, ...]
    num_accepted: int
    path: tuple[int, ...] = ()

    def row_of(self, index: int) -> int:
        """The row that gave token `index`, counted from the task's first."""
        return self.path[index - 1] + 1 if self.path and index > 0 else index


def prepare(task: VerifyTask, num_tokens: int) -> Trial:
    """The trial of a task for a vocabulary of `num_tokens`."""
    ids = task.draft.token_ids
    matcher = task.sequence.matcher
    num_valid = next((i for i, token_id in enumerate(ids) if not 0 <= token_id < num_tokens), len(ids))
    masks: Seq[TokenMask | None] = [None] * (num_valid + 1)
    if matcher is not None and task.draft.parents:
        masks = [matcher.mask_after(task.draft.path(node)) for node in range(-1, num_valid)]
    elif matcher is not None:
        num_valid = matcher.num_allowed(ids[:num_valid])
        masks = matcher.masks(ids[:num_valid])
    draft_ids = ids if num_valid == len(ids) else (*ids[:num_valid], IMPOSSIBLE_ID)
    task = replace(task, draft=task.draft.head(len(draft_ids)))
    return Trial(task, draft_ids, tuple(_row(task, index - 1, mask) for index, mask in enumerate(masks)))


def _row(task: VerifyTask, node: int, mask: TokenMask | None) -> LogitsRow:
    """The row that is judged after the committed tokens and the drafts that lead to `node`."""
    sequence = task.sequence
    return LogitsRow(
        sampling=sequence.sampling,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        sample_index=sequence.request.sample_index,
        draft_ids=task.draft.path(node),
        mask=mask,
    )
