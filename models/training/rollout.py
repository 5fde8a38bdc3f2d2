"""The target's own text, as the draft gets it at serving time: a part of its training text."""

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from models.training.architecture import REPETITION_PENALTY
from models.training.tokens import WindowStream
from tuning.score import generate


class RolloutPool:
    """A bag of written windows [N, T + 1], drawn from at random."""

    def __init__(self, written: Tensor, seed: int) -> None:
        self._written = written
        self._rng = np.random.default_rng(seed)

    def __len__(self) -> int:
        return len(self._written)

    def windows(self, num_windows: int, num_tokens: int) -> Tensor:
        """Draw `num_windows` windows [B, T + 1] with replacement."""
        return self._written[self._rng.integers(0, len(self), num_windows)][:, : num_tokens + 1]


def mixed_sources(
    stream: WindowStream, rollouts: RolloutPool, every_batches: int
) -> Iterator[WindowStream | RolloutPool]:
    """Return endless sources of batches: the corpus, and the rollouts once in `every_batches`."""
    return itertools.cycle([*[stream] * (every_batches - 1), rollouts])


def write_rollouts(
    target: LlamaForCausalLM, stream: WindowStream, num_windows: int, num_prompt_tokens: int, num_tokens: int, seed: int
) -> RolloutPool:
    """Return windows [N, num_tokens + 1] of the stream's text with the target's continuations, on the CPU.

    Half are greedy, half at temperature 1, with the served repetition penalty.
    """
    written = []
    for temperature in (0.0, 1.0):
        prompts = stream.windows(num_windows // 2, num_prompt_tokens)[:, 1:].to(target.device)
        num_new = num_tokens + 1 - num_prompt_tokens
        written.append(generate(target, prompts, num_new, temperature, seed, REPETITION_PENALTY))
    return RolloutPool(torch.cat(written).cpu(), seed)
