"""A target that gives recorded answers, at the full cost of its passes."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.batch.draft import depths
from engine.verifier.verifier import Verifier
from engine.verifier.verify_result import VerifyResult
from engine.verifier.verify_task import VerifyTask


class RecordedVerifier(Verifier):
    """Verifies against recorded answers where a request has one, against the logits where it has none.

    Attributes:
        answers: by request id; its owner fills it.
    """

    answers: Mapping[str, Seq[int]] = {}

    @torch.inference_mode()
    def verify(self, logits: Tensor, tasks: Seq[VerifyTask]) -> list[VerifyResult]:
        """Verify as `Verifier` does; rows of a recorded request become certain of the recorded token at their depth."""
        for task in tasks:
            answer = self.answers.get(task.sequence.request_id)
            if answer is not None:
                _dictate(logits, task, answer)
        return super().verify(logits, tasks)


def _dictate(logits: Tensor, task: VerifyTask, answer: Seq[int]) -> None:
    num_said = len(task.sequence.token_ids) - task.sequence.num_prompt_tokens
    parents = task.draft.parents or range(-1, len(task.draft.token_ids) - 1)
    for row, depth in enumerate((0, *depths(parents))):
        place = num_said + depth
        if task.first_row + row < len(logits) and place < len(answer):
            logits[task.first_row + row] = -torch.inf
            logits[task.first_row + row, answer[place]] = 0.0
