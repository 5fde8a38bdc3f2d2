"""Muon for the matrices, AdamW for the rest, and the warmup-stable-decay schedule they share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import LlamaForCausalLM

WARMUP_FRACTION = 0.02
DECAY_FRACTION = 0.35
MOMENTUM = 0.95
WEIGHT_DECAY = 0.1
# The quintic of Keller Jordan, https://kellerjordan.github.io/posts/muon/
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def product_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if it is faster for products of many rows: on GPUs and on processors with AMX; else float32.

    AVX512-BF16 is not enough, on Intel's processors at least; AMD's with it are not measured. A Xeon that has it and no
    AMX, with one thread and torch 2.13: 2,048 x 576 times 576 x 1,536 in 22 ms in float32 and 41 in bfloat16, and 1.2
    and 2.3 ms at the widths of the demo's draft.
    """
    has_units = device.type == "cuda" or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if has_units else torch.float32


def schedule(progress: float) -> float:
    """Return the factor on every learning rate at `progress` in [0, 1]: up, flat, and linearly down to nothing."""
    return min(1.0, (progress + 1e-3) / WARMUP_FRACTION, max(0.0, (1.0 - progress) / DECAY_FRACTION))


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
                momentum.lerp_(parameter.grad, 1.0 - MOMENTUM)
                update = orthogonalise(parameter.grad.lerp(momentum, MOMENTUM))
                scale = max(1.0, update.shape[0] / update.shape[1]) ** 0.5
                parameter.mul_(1.0 - lr * WEIGHT_DECAY).add_(update, alpha=-lr * scale)


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
