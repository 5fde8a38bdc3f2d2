"""The acceptance of a head's drafts, and the value of a round.

A head is a function of a text: for the j-th draft of a round it returns the logits at every position where a round may
begin. A draft is accepted only if all earlier ones are, so a round always continues the target's own text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from models.demo_pair.evaluate import Acceptance, summarise
from tuning.score import choose, generate

# Of ids [B, T] and K: for j = 0 .. K - 1 the logits [B, at least T - K - 1, V] whose row p predicts token p + 2 + j.
DraftLogits = Callable[[Tensor, int], Iterator[Tensor]]


@torch.no_grad()
def verdicts(
    head: DraftLogits, ids: Tensor, num_prompt_tokens: int, temperature: float, num_draft_tokens: int, seed: int
) -> Tensor:
    """Mark accepted drafts along ids [B, T], as [B, rounds, K]: entry [b, i, j] is draft j of the round at token i.

    Only rounds that end within the text count.
    """
    num_rounds = ids.shape[1] - num_prompt_tokens - num_draft_tokens + 1
    found = torch.zeros(len(ids), num_rounds, num_draft_tokens, dtype=torch.bool)
    for step, logits in enumerate(head(ids, num_draft_tokens)):
        for begin in range(num_rounds):
            place = num_prompt_tokens + begin + step
            chosen = choose(logits[:, place - 2 - step].float(), temperature, seed, place)
            found[:, begin, step] = chosen == ids[:, place]
    return found


def count_rounds(is_accepted: Tensor) -> list[int]:
    """Return the accepted tokens of each round of a decoder along `is_accepted` [rounds, K]."""
    runs: list[int] = is_accepted.long().cumprod(dim=1).sum(dim=1).tolist()
    accepted, cursor = [], 0
    while cursor < len(runs):
        accepted.append(runs[cursor])
        cursor += runs[cursor] + 1
    return accepted


def measure_head(
    target: LlamaForCausalLM,
    head: DraftLogits,
    prompts: Tensor,
    temperature: float,
    num_tokens: int = 128,
    num_draft_tokens: int = 5,
    seed: int = 0,
) -> Acceptance:
    """Measure as `models.demo_pair.evaluate.measure_acceptance` does, with a head as the draft.

    `per_token` is the acceptance of the first draft of a round, over all positions.
    """
    ids = generate(target, prompts, num_tokens, temperature, seed)
    is_accepted = verdicts(head, ids, prompts.shape[1], temperature, num_draft_tokens, seed)
    accepted = [run for row in is_accepted for run in count_rounds(row)]
    return summarise(accepted, is_accepted[..., 0], ids[:, prompts.shape[1] :], num_draft_tokens)
