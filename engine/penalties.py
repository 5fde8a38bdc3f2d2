"""Repetition, frequency and presence penalties, from the counts of each row's own prefix.

The prefix of a draft row holds the drafts before it. Taking the committed tokens alone for all rows is cheaper and
wrong: the second draft would be judged by another law than plain decoding uses (ALGORITHMS.md 1.6).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.row import Row


def has_penalties(row: Row) -> bool:
    law = row.sampling
    return law.repetition_penalty != 1.0 or law.presence_penalty != 0.0 or law.frequency_penalty != 0.0


def penalize(scores: Tensor, rows: Seq[Row]) -> Tensor:
    """Repetition (CTRL, arXiv:1909.05858), then frequency and presence as OpenAI has them; `[R, V]` -> `[R, V]`."""
    generated = _count(rows, scores.shape[1], in_prompt=False).to(scores)  # [R, V]
    if any(row.sampling.repetition_penalty != 1.0 for row in rows):
        is_seen = (generated + _count(rows, scores.shape[1], in_prompt=True).to(scores)) > 0
        repetition = _column([row.sampling.repetition_penalty for row in rows], scores)
        scores = torch.where(is_seen, torch.where(scores > 0, scores / repetition, scores * repetition), scores)
    frequency = _column([row.sampling.frequency_penalty for row in rows], scores)
    presence = _column([row.sampling.presence_penalty for row in rows], scores)
    return scores - frequency * generated - presence * (generated > 0)


def _count(rows: Seq[Row], num_tokens: int, *, in_prompt: bool) -> Tensor:
    """How often each token occurs in each row's prompt, or after it: `[R, V] int64`."""
    committed: dict[int, Tensor] = {}  # rows of one sequence share their list of committed tokens
    counts = []
    for row in rows:
        if id(row.token_ids) not in committed:
            part = row.token_ids[: row.num_prompt_tokens] if in_prompt else row.token_ids[row.num_prompt_tokens :]
            committed[id(row.token_ids)] = _histogram(part, num_tokens)
        count = committed[id(row.token_ids)]
        counts.append(count if in_prompt or not row.draft_ids else count + _histogram(row.draft_ids, num_tokens))
    return torch.stack(counts)


def _histogram(token_ids: Seq[int], num_tokens: int) -> Tensor:
    """Occurrences of [0, num_tokens); others are left out, for a draft model may know fewer tokens."""
    ids = torch.tensor(token_ids, dtype=torch.int64)
    return torch.bincount(ids[ids < num_tokens], minlength=num_tokens)


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]  # [R, 1]
