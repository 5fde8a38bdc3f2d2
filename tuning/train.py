"""The training loop of the pair and the EAGLE-3 head: budget, clock, checkpoints, log.

Budgets are wall-clock minutes, because the learning rate must reach zero when the time is over, on every machine. A
checkpoint is written every few minutes, so an interrupted run still leaves a pair.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tuning.optimizer import PairedOptimizer, product_dtype

logger = logging.getLogger(__name__)

CHECKPOINT_EVERY_S = 240.0
LOG_EVERY_STEPS = 10


@dataclass(frozen=True, slots=True)
class Budget:
    """The minutes, device and batches of a training; `max_tokens` may end a run before its minutes do."""

    minutes: float
    device: torch.device
    tokens_per_step: int = 6144
    short_window_tokens: int = 512
    long_window_tokens: int = 1024
    max_tokens: int | None = None
    checkpoint_every_s: float = CHECKPOINT_EVERY_S


@dataclass(frozen=True, slots=True)
class TrainingReport:
    """The cost of a run, for the model card."""

    num_steps: int
    num_tokens: int
    seconds: float
    last_loss: float


class TrainingClock:
    """The progress of a run in [0, 1]: the larger of its used parts of time and of tokens.

    A resumed run starts with its earlier `seconds` and `num_steps`.
    """

    def __init__(self, budget: Budget, seconds: float = 0.0, num_steps: int = 0) -> None:
        self._budget = budget
        self._start = time.monotonic() - seconds
        self.num_steps = num_steps
        self.num_tokens = num_steps * budget.tokens_per_step

    @property
    def seconds(self) -> float:
        """Wall-clock seconds since the run began."""
        return time.monotonic() - self._start

    @property
    def progress(self) -> float:
        """The fraction of the budget that is spent."""
        by_tokens = self.num_tokens / self._budget.max_tokens if self._budget.max_tokens else 0.0
        return max(self.seconds / (60.0 * self._budget.minutes), by_tokens)

    def tick(self, num_tokens: int) -> None:
        """Count one step of `num_tokens`."""
        self.num_steps += 1
        self.num_tokens += num_tokens


def autocast(device: torch.device) -> torch.autocast:
    """Compute matrix products in bfloat16 over float32 master weights, if that is faster on the device."""
    is_faster = product_dtype(device) is torch.bfloat16
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_faster)


def train(
    model: nn.Module,
    optimizer: PairedOptimizer,
    step_loss: Callable[[float], Tensor],
    budget: Budget,
    save: Callable[[], None],
    clock: TrainingClock | None = None,
) -> TrainingReport:
    """Step until the budget is spent; `step_loss` maps progress in [0, 1] to the loss of the next batch.

    `save` is called every few minutes and at the end. `clock` belongs to a resumed run; None starts a new one.
    """
    clock = clock or TrainingClock(budget)
    saved_at, mean_loss = clock.seconds, 0.0
    while (progress := clock.progress) < 1.0:
        loss = step_loss(progress)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(progress)
        clock.tick(budget.tokens_per_step)
        mean_loss += (loss.item() - mean_loss) / min(clock.num_steps, LOG_EVERY_STEPS)
        if clock.num_steps % LOG_EVERY_STEPS == 0:
            _log_step(clock, mean_loss)
        if clock.seconds - saved_at > budget.checkpoint_every_s:
            save()
            saved_at = clock.seconds
    save()
    return TrainingReport(clock.num_steps, clock.num_tokens, clock.seconds, mean_loss)


def _log_step(clock: TrainingClock, mean_loss: float) -> None:
    logger.info(
        "step=%d tokens=%d seconds=%.0f tokens_per_s=%.0f loss=%.3f",
        clock.num_steps,
        clock.num_tokens,
        clock.seconds,
        clock.num_tokens / clock.seconds,
        mean_loss,
    )
