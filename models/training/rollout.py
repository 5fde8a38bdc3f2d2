"""The target's own text, as the draft gets it at serving time: a part of its training text."""

import itertools
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from models.training.architecture import REPETITION_PENALTY
from models.training.tokens import WindowStream


def gumbel_noise(num_sequences: int, vocab_size: int, seed: int, position: int) -> Tensor:
    """Return the noise [B, V] of one position, a pure function of (seed, position): draft and target draw the same."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + position)
    uniform = torch.rand(num_sequences, vocab_size, generator=generator).clamp(1e-9, 1.0 - 1e-7)
    return -torch.log(-torch.log(uniform))


def choose(logits: Tensor, temperature: float, seed: int, position: int) -> Tensor:
    """Return tokens [B] sampled from logits [B, V] at `position`: argmax(logits / temperature + noise)."""
    if temperature == 0.0:
        return logits.argmax(-1)
    num_sequences, vocab_size = logits.shape
    noise = gumbel_noise(num_sequences, vocab_size, seed, position).to(logits.device)
    return (logits / temperature + noise).argmax(-1)


def penalise(logits: Tensor, ids: Tensor, penalty: float) -> Tensor:
    """Divide the logits [B, V] of the tokens in `ids` [B, S] by the penalty, or multiply them where negative."""
    seen = logits.gather(1, ids)
    return logits.scatter(1, ids, torch.where(seen > 0, seen / penalty, seen * penalty))


@torch.no_grad()
def generate(
    model: LlamaForCausalLM,
    prompts: Tensor,
    num_tokens: int,
    temperature: float,
    seed: int,
    repetition_penalty: float = 1.0,
) -> Tensor:
    """Prompts [B, S] with the model's continuations [B, S + num_tokens]; an end of text does not stop it."""
    cache, ids, inputs = DynamicCache(config=model.config), prompts, prompts
    for position in range(prompts.shape[1], prompts.shape[1] + num_tokens):
        logits = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()  # [B, V]
        inputs = choose(penalise(logits, ids, repetition_penalty), temperature, seed, position).unsqueeze(1)  # [B, 1]
        ids = torch.cat([ids, inputs], dim=1)
    return ids


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
