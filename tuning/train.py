"""The training loop of the pair and the EAGLE-3 head: budget, clock, checkpoints, log.

Budgets are wall-clock minutes, because the learning rate must reach zero when the time is over, on every machine. A
checkpoint is written every few minutes, so an interrupted run still leaves a pair.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from transformers import LlamaForCausalLM

logger = logging.getLogger(__name__)

# The quintic of Keller Jordan, https://kellerjordan.github.io/posts/muon/
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def product_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if it is faster for products of many rows: on GPUs and on processors with AMX; else float32.

    AVX512-BF16 alone may be slower, so it is measured. 2,048 x 576 times 576 x 1,536, torch 2.13, one thread: an Intel
    Xeon 22 ms in float32 and 41 in bfloat16, an AMD Zen 5 44 and 11 (processor time).
    """
    has_units = device.type == "cuda" or torch.cpu._is_amx_tile_supported() or _is_faster_in_bfloat16()
    return torch.bfloat16 if has_units else torch.float32


@cache
def _is_faster_in_bfloat16() -> bool:
    if not torch.cpu._is_avx512_bf16_supported():
        return False
    return product_seconds(torch.bfloat16) < 0.8 * product_seconds(torch.float32)


def product_seconds(dtype: torch.dtype) -> float:
    """Return the shortest of five measured times of one product, in seconds of the processor."""
    x, seconds = torch.ones(512, 512, dtype=dtype), []
    for _ in range(5):
        began_s = time.thread_time()
        x @ x
        seconds.append(time.thread_time() - began_s)
    return min(seconds)


def schedule(progress: float) -> float:
    """Return the factor on every learning rate at `progress` in [0, 1]: up, flat, and linearly down to nothing."""
    # The rate rises in the first 2% and falls in the last 35%.
    return min(1.0, (progress + 1e-3) / 0.02, max(0.0, (1.0 - progress) / 0.35))


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return the semi-orthogonal matrix nearest to `matrix` [rows, columns], by five Newton-Schulz steps."""
    a, b, c = NEWTON_SCHULZ
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if is_tall else matrix).to(product_dtype(matrix.device))
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    nearest: Tensor = (x.T if is_tall else x).to(matrix.dtype)
    return nearest


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one CPU thread in this block: for small matrices, barriers on a busy machine cost more than threads gain.

    256 x 768 with two other busy processes on two cores: 2.7 ms with one thread, 50 ms with two.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class Muon:
    """Orthogonalised Nesterov momentum with decoupled weight decay."""

    def __init__(self, parameters: list[Parameter]) -> None:
        self._momenta = [(parameter, torch.zeros_like(parameter)) for parameter in parameters]

    @property
    def momenta(self) -> list[Tensor]:
        """The running means of the gradients, in the order of the parameters."""
        return [momentum for _, momentum in self._momenta]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Move every parameter by its orthogonalised momentum."""
        with one_thread():
            for parameter, momentum in self._momenta:
                assert parameter.grad is not None
                momentum.lerp_(parameter.grad, 0.05)
                update = orthogonalise(parameter.grad.lerp(momentum, 0.95))
                scale = max(1.0, update.shape[0] / update.shape[1]) ** 0.5
                parameter.mul_(1.0 - lr * 0.1).add_(update, alpha=-lr * scale)


class PairedOptimizer:
    """Muon over matrices and AdamW over everything else, driven by one schedule."""

    def __init__(
        self, matrices: Iterable[Parameter], others: Iterable[Parameter], matrix_lr: float, other_lr: float
    ) -> None:
        self._matrices, self._others = list(matrices), list(others)
        self._matrix_lr, self._other_lr = matrix_lr, other_lr
        self._muon = Muon(self._matrices)
        self._adam = torch.optim.AdamW(self._others, lr=other_lr, betas=(0.9, 0.98), weight_decay=0.0)

    @classmethod
    def of_llama(cls, model: LlamaForCausalLM, matrix_lr: float, embedding_lr: float) -> PairedOptimizer:
        """Muon over the layers' matrices, AdamW over embedding and norms."""
        matrices = [parameter for parameter in model.model.layers.parameters() if parameter.ndim == 2]
        others = [model.model.embed_tokens.weight, *(p for p in model.parameters() if p.ndim == 1)]
        return cls(matrices, others, matrix_lr, embedding_lr)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict` of a new optimizer of the same parameters."""
        return {"muon": self._muon.momenta, "adam": self._adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        for momentum, saved in zip(self._muon.momenta, state["muon"], strict=True):
            momentum.copy_(saved)
        self._adam.load_state_dict(state["adam"])

    def step(self, progress: float) -> None:
        """One update at `progress` in [0, 1] of the budget; the gradients are cleared afterwards."""
        factor = schedule(progress)
        for group in self._adam.param_groups:
            group["lr"] = self._other_lr * factor
        self._muon.step(self._matrix_lr * factor)
        self._adam.step()
        for parameter in (*self._matrices, *self._others):
            parameter.grad = None


@dataclass(frozen=True, slots=True)
class Budget:
    """The minutes, device and batches of a training; `max_tokens` may end a run before its minutes do."""

    minutes: float
    device: torch.device
    tokens_per_step: int = 6144
    short_window_tokens: int = 512
    long_window_tokens: int = 1024
    max_tokens: int | None = None
    checkpoint_every_s: float = 240.0


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
) -> dict[str, float]:
    """Step until the budget is spent, and return the cost of the run.

    `step_loss` maps progress in [0, 1] to the loss of the next batch. `save` is called every few minutes and at the
    end. `clock` belongs to a resumed run; None starts a new one.
    """
    clock = clock or TrainingClock(budget)
    log_every = 10  # steps
    saved_at, mean_loss = clock.seconds, 0.0
    while (progress := clock.progress) < 1.0:
        loss = step_loss(progress)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(progress)
        clock.tick(budget.tokens_per_step)
        mean_loss += (loss.item() - mean_loss) / min(clock.num_steps, log_every)
        if clock.num_steps % log_every == 0:
            _log_step(clock, mean_loss)
        if clock.seconds - saved_at > budget.checkpoint_every_s:
            save()
            saved_at = clock.seconds
    save()
    cost = {"num_steps": clock.num_steps, "num_tokens": clock.num_tokens, "seconds": clock.seconds}
    return {**cost, "last_loss": mean_loss}


def _log_step(clock: TrainingClock, mean_loss: float) -> None:
    logger.info(
        "step=%d tokens=%d seconds=%.0f tokens_per_s=%.0f loss=%.3f",
        clock.num_steps,
        clock.num_tokens,
        clock.seconds,
        clock.num_tokens / clock.seconds,
        mean_loss,
    )
