"""Prompts for benchmarks: the beginnings of Python functions that the demo pair has not seen, and recorded texts."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from tokenizers import Tokenizer

from models.training.tokens import collect

PROMPT_TOKENS = 96


def held_out_prompts(model_path: Path, num_prompts: int, num_tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """Return the token ids of `num_prompts` distinct prompts of `num_tokens` tokens from held-out files.

    The first prompt of a file starts at its middle, the next ones follow it.
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


def recorded_prompts(
    model_path: Path, path: Path, num_prompts: int, num_tokens: int = PROMPT_TOKENS
) -> list[list[int]]:
    """Return the last tokens of the first long texts of JSON lines: questions with `turns`, or calls with `input`."""
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    prompts: list[list[int]] = []
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        for line in map(json.loads, lines):
            text = line["turns"][0] if "turns" in line else line["input"]
            token_ids = tokenizer.encode(text, add_special_tokens=False).ids[-num_tokens:]
            if len(token_ids) == num_tokens and token_ids not in prompts:
                prompts.append(token_ids)
            if len(prompts) == num_prompts:
                return prompts
    raise ValueError(f"{path} has {len(prompts)} texts of {num_tokens} tokens; {num_prompts} are needed")
