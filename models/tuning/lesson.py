"""One step of tuning: windows of the log, and the draft's distance from what the target found likely there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from models.training.loss import top_distillation_loss
from models.training.train import Budget, autocast
from models.tuning.log_windows import Window, known_ids, read_batch

_NEIGHBOURS = 4  # windows by length from which each one of a batch is chosen
_L1_WEIGHT = 1.0  # as of the demo draft's own training


class DivergedError(Exception):
    """The loss is no number any more: this learning rate is too high."""


class LogLesson:
    """Gives the loss of the next batch; batch n is a function of the seed and n, so that a run can go on.

    Windows of like lengths are in a batch together: what is shorter than its longest one is computed for nothing.

    Args:
        model: the draft, in float32.
        windows: those that train.
        budget: tokens of a batch, and the device.
        seed: of the order of windows.
        num_steps: batches that the run has had before.
    """

    def __init__(
        self, model: nn.Module, windows: Sequence[Window], budget: Budget, seed: int, num_steps: int = 0
    ) -> None:
        self._model, self._budget = model, budget
        self._windows = sorted(windows, key=lambda window: len(window.token_ids))
        self._seed, self._num_steps = seed, num_steps

    def __call__(self, progress: float) -> Tensor:
        """Return the loss of the next batch; it does not depend on `progress`. Raises DivergedError."""
        windows = self._next()
        device = self._budget.device
        with autocast(device):
            logits = read_batch(self._model, windows)
        top_ids = known_ids(torch.cat([window.top_ids for window in windows]), logits.shape[1]).to(device)
        top_logprobs = torch.cat([window.top_logprobs for window in windows]).to(device).float()
        loss = top_distillation_loss(logits, top_ids, top_logprobs, _L1_WEIGHT)
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
