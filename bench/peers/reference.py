"""Prompts for all, and the target's own greedy text in float32, which no rounding of ours or of a peer has touched."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from bench.contenders.contender import Prompts
from bench.contenders.prompts import held_out_prompts
from bench.contenders.transformers_contender import load


@dataclass(frozen=True, slots=True)
class Reference:
    """Distinct prompts, and the tokens that Transformers in float32 gives after each."""

    prompts: Prompts
    outputs: list[list[int]]


def reference_of(target: Path, num_prompts: int, num_tokens: int) -> Reference:
    """Return the reference of a target with the fixture's logits.

    Prompts after which it would end within `num_tokens` are left out, since engines differ in their treatment of an end
    that is to be ignored. So are those after which it writes more than ASCII: llama-server's stream has no token ids
    for pieces of a character.

    Raises SystemExit when too few prompts are left.
    """
    candidates = held_out_prompts(target, num_prompts + num_prompts // 2 + 1)
    input_ids = torch.tensor(candidates)
    model = load(target, torch.float32)
    ends = _end_tokens(model)
    model.generation_config.eos_token_id = None
    generate: Any = model.generate
    mask = torch.ones_like(input_ids)
    rows = generate(input_ids, attention_mask=mask, do_sample=False, repetition_penalty=1.0, max_new_tokens=num_tokens)
    outputs = rows[:, input_ids.shape[1] :].tolist()
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    kept = [
        (prompt, output)
        for prompt, output in zip(candidates, outputs, strict=True)
        if not ends & set(output) and tokenizer.decode(output).isascii()
    ][:num_prompts]
    if len(kept) < num_prompts:
        raise SystemExit(
            f"only {len(kept)} of {len(candidates)} texts go on in ASCII for {num_tokens} tokens; lower --tokens"
        )
    return Reference([prompt for prompt, _ in kept], [output for _, output in kept])


def _end_tokens(model: PreTrainedModel) -> set[int]:
    ends = model.generation_config.eos_token_id
    return set(ends if isinstance(ends, list) else [ends])
