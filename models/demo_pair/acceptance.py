"""The draft's acceptance, measured on the target's own continuations.

A position is accepted only if all earlier ones are, so the draft always continues the target's own tokens. Therefore
one teacher-forced pass over the finished text gives every decision of every round.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from tuning.score import choose, generate, penalise


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance over all rounds.

    `by_position[j]` is the acceptance of draft token j, given acceptance of the earlier ones. `per_token` is plain
    agreement over all positions. `repetition` is the repeated fraction of the continuations.
    """

    num_rounds: int
    by_position: list[float]
    tokens_per_pass: float
    per_token: float
    repetition: float


@torch.no_grad()
def agreement(
    draft: LlamaForCausalLM,
    ids: Tensor,
    num_prompt_tokens: int,
    temperature: float,
    seed: int,
    repetition_penalty: float = 1.0,
) -> Tensor:
    """Mark where the draft chooses the target's token, [B, generated], along ids [B, S + generated]."""
    logits = draft(ids[:, :-1], use_cache=False).logits[:, num_prompt_tokens - 1 :].float()  # [B, generated, V]
    chosen = []
    for step, position in enumerate(range(num_prompt_tokens, ids.shape[1])):
        penalised = penalise(logits[:, step], ids[:, :position], repetition_penalty)
        chosen.append(choose(penalised, temperature, seed, position))
    return torch.stack(chosen, dim=1) == ids[:, num_prompt_tokens:]


def count_rounds(agrees: list[bool], num_draft_tokens: int) -> list[int]:
    """Return the accepted tokens of each round along `agrees`; a round that the end of the text cuts is left out."""
    accepted, cursor = [], 0
    while cursor + num_draft_tokens <= len(agrees):
        run = 0
        while run < num_draft_tokens and agrees[cursor + run]:
            run += 1
        accepted.append(run)
        cursor += run + 1
    return accepted


def repetition(row: list[int], num_gram_tokens: int = 8) -> float:
    """Return the share of repeated n-grams of `row`: near 1 for a loop, near 0 for fresh text."""
    grams = [tuple(row[start : start + num_gram_tokens]) for start in range(len(row) - num_gram_tokens + 1)]
    return 1.0 - len(set(grams)) / max(1, len(grams))


@torch.no_grad()
def text_agreement(target: LlamaForCausalLM, draft: LlamaForCausalLM, windows: Iterable[Tensor]) -> float:
    """Return how often both models' likeliest next token is the same along given text, windows of [1, T]."""
    num_equal, num_tokens = 0, 0
    for ids in windows:
        chosen = [model(ids, use_cache=False).logits.argmax(-1) for model in (target, draft)]  # two of [1, T]
        num_equal += int((chosen[0] == chosen[1]).sum())
        num_tokens += ids.numel()
    return num_equal / max(1, num_tokens)


def summarise(accepted: list[int], agrees: Tensor, written: Tensor, num_draft_tokens: int) -> Acceptance:
    """Return the figures of the rounds over the continuations `written` [B, generated], accepted where `agrees`."""
    reached = [sum(run >= position for run in accepted) for position in range(num_draft_tokens + 1)]
    return Acceptance(
        num_rounds=len(accepted),
        by_position=[reached[j + 1] / max(1, reached[j]) for j in range(num_draft_tokens)],
        tokens_per_pass=sum(accepted) / max(1, len(accepted)) + 1.0,
        per_token=agrees.float().mean().item(),
        repetition=sum(repetition(row) for row in written.tolist()) / len(written),
    )


def measure_acceptance(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    prompts: Tensor,
    temperature: float,
    num_tokens: int = 128,
    num_draft_tokens: int = 5,
    seed: int = 0,
    repetition_penalty: float = 1.0,
) -> Acceptance:
    """Acceptance over continuations of prompts [B, S] by `num_tokens` tokens each, with K = `num_draft_tokens`."""
    ids = generate(target, prompts, num_tokens, temperature, seed, repetition_penalty)
    agrees = agreement(draft, ids, prompts.shape[1], temperature, seed, repetition_penalty)
    accepted = [run for row in agrees.tolist() for run in count_rounds(row, num_draft_tokens)]
    return summarise(accepted, agrees, ids[:, prompts.shape[1] :], num_draft_tokens)
