"""One step of tuning: windows of the log, and the draft's distance from the logged target distribution."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from models.training.loss import top_distillation_loss
from models.training.train import Budget, autocast
from models.tuning.log_windows import Window
from models.tuning.student import Student

_NEIGHBOURS = 4  # candidates by length for each window of a batch
_L1_WEIGHT = 1.0  # as of the demo draft's own training
_NUM_DRAFTS = 4  # of a round, that heads learn; the weights decrease
_DRAFT_WEIGHT = 0.8


class DivergedError(Exception):
    """The loss is no number any more: this learning rate is too high."""


class LogLesson:
    """Gives the loss of the next batch; batch n is a function of the seed and n, so that a run can be resumed.

    A batch has windows of similar lengths, since padding to the longest is wasted.

    Args:
        student: the draft.
        windows: the windows that train.
        budget: tokens of a batch, and the device.
        seed: of the order of windows.
        num_steps: batches that the run has had before.
    """

    def __init__(
        self, student: Student, windows: Sequence[Window], budget: Budget, seed: int, num_steps: int = 0
    ) -> None:
        self._student, self._budget = student, budget
        self._windows = sorted(windows, key=lambda window: len(window.token_ids))
        self._seed, self._num_steps = seed, num_steps

    def __call__(self, progress: float) -> Tensor:
        """Return the loss of the next batch; it does not depend on `progress`. Raises DivergedError."""
        windows, student = self._next(), self._student
        device = self._budget.device
        top_ids = student.draft_ids(torch.cat([window.top_ids for window in windows])).to(device)
        top_logprobs = torch.cat([window.top_logprobs for window in windows]).to(device).float()
        total, weight, weights = torch.zeros((), device=device), 1.0, 0.0
        with autocast(device):
            for logits in student.logits(windows, student.num_unlike(_NUM_DRAFTS)):
                total = total + weight * top_distillation_loss(logits, top_ids, top_logprobs, _L1_WEIGHT)
                weight, weights = weight * _DRAFT_WEIGHT, weights + weight
        loss = total / weights
        if not torch.isfinite(loss):
            raise DivergedError
        return loss

    def _next(self) -> list[Window]:
        rng = np.random.default_rng((self._seed, self._num_steps))
        self._num_steps += 1
        last = int(rng.integers(len(self._windows)))
        number = max(1, self._budget.tokens_per_step // len(self._windows[last].token_ids))
        alike = self._windows[max(0, last + 1 - _NEIGHBOURS * number) : last + 1]
        return [alike[index] for index in rng.choice(len(alike), min(number, len(alike)), replace=False)]
