"""Sampling from a transformers model with the noise that its draft shares."""

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM


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
