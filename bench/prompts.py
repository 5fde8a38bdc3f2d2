"""Prompts for benchmarks: the beginnings of Python functions in files the demo pair was not trained on."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from models.corpus import collect

PROMPT_TOKENS = 96


def held_out_prompts(model_path: Path, num_prompts: int, num_tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """Token ids of `num_prompts` distinct prompts, each cut after `num_tokens` tokens of a different held-out file."""
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    prompts = []
    for document in collect().held_out:
        token_ids = tokenizer.encode(document.text, add_special_tokens=False).ids
        if len(token_ids) >= 4 * num_tokens:
            middle = len(token_ids) // 2
            prompts.append(token_ids[middle : middle + num_tokens])
        if len(prompts) == num_prompts:
            return prompts
    raise ValueError(
        f"only {len(prompts)} held-out files are long enough for {num_prompts} prompts of {num_tokens} tokens"
    )
