"""One sequence's verification inside the verifier's batch, and how it came out."""

from __future__ import annotations

from dataclasses import dataclass

from engine.row import Row
from engine.verifier import VerifyTask
from protos.messages import VerifyMode

IMPOSSIBLE_ID = -1  # equals no sampled token and has probability 0


@dataclass(frozen=True, slots=True)
class Trial:
    """A task made ready: its drafts, and the rows that can matter.

    `draft_ids` end where the first draft outside the vocabulary was, if there is one, with `IMPOSSIBLE_ID`: that one
    cannot be accepted, so what follows it is left out. `rows[i]` is judged after the first i drafts; there is one row
    more than valid drafts.
    """

    task: VerifyTask
    draft_ids: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def mode(self) -> VerifyMode:
        """How the task is verified; a greedy one always by matching, since every mode then emits the argmax."""
        return VerifyMode.COUPLED if self.rows[0].is_greedy else self.task.sequence.verify


@dataclass(frozen=True, slots=True)
class Outcome:
    """The committed tokens: `num_accepted` drafts, then the recovered or bonus token."""

    token_ids: tuple[int, ...]
    num_accepted: int


def prepare(task: VerifyTask, num_tokens: int) -> Trial:
    """The trial of a task for a vocabulary of `num_tokens`."""
    ids = task.draft.token_ids
    num_valid = next((i for i, token_id in enumerate(ids) if not 0 <= token_id < num_tokens), len(ids))
    draft_ids = ids if num_valid == len(ids) else (*ids[:num_valid], IMPOSSIBLE_ID)
    return Trial(task, draft_ids, tuple(_row(task, i) for i in range(num_valid + 1)))


def _row(task: VerifyTask, num_drafts: int) -> Row:
    """The row that is judged after the committed tokens and the first `num_drafts` drafts."""
    sequence = task.sequence
    return Row(
        sampling=sequence.sampling,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        sample_index=sequence.request.sample_index,
        draft_ids=task.draft.token_ids[:num_drafts],
    )
