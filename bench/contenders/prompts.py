"""Prompts for benchmarks: the beginnings of Python functions in files the demo pair was not trained on."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from models.training.corpus import collect

PROMPT_TOKENS = 96


def held_out_prompts(model_path: Path, num_prompts: int, num_tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """Token ids of `num_prompts` distinct prompts of `num_tokens` tokens from held-out files.

    They are taken from the middle of each file, then, where more are wanted than there are files, from further on.
    """
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    texts = [tokenizer.encode(document.text, add_special_tokens=False).ids for document in collect().held_out]
    halves = [text[len(text) // 2 :] for text in texts if len(text) >= 4 * num_tokens]
    prompts: list[list[int]] = []
    for start in range(0, max(map(len, halves), default=0), num_tokens):
        pieces = [half[start : start + num_tokens] for half in halves]
        prompts += [piece for piece in pieces if len(piece) == num_tokens]
        if len(prompts) >= num_prompts:
            return prompts[:num_prompts]
    raise ValueError(
        f"the held-out files are too short for {num_prompts} prompts of {num_tokens} tokens: they have {len(prompts)}"
    )
