"""Repetition, frequency and presence penalties, from the counts of each row's own prefix.

The prefix of a draft row holds the drafts before it. Taking the committed tokens alone for all rows is cheaper and
wrong: the second draft would be judged by another law than plain decoding uses.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import chain

import torch
from torch import Tensor

from engine.index import upload
from engine.row import Row


def has_penalties(row: Row) -> bool:
    law = row.sampling
    return law.repetition_penalty != 1.0 or law.presence_penalty != 0.0 or law.frequency_penalty != 0.0


def penalize(scores: Tensor, rows: Seq[Row]) -> Tensor:
    """Repetition (CTRL, arXiv:1909.05858), then frequency and presence as OpenAI has them; `[R, V]` -> `[R, V]`."""
    generated = _count_generated(rows, scores)  # [R, V]
    if any(row.sampling.repetition_penalty != 1.0 for row in rows):
        is_seen = (generated + _count_prompt(rows, scores)) > 0
        repetition = _column([row.sampling.repetition_penalty for row in rows], scores)
        scores = torch.where(is_seen, torch.where(scores > 0, scores / repetition, scores * repetition), scores)
    frequency = _column([row.sampling.frequency_penalty for row in rows], scores)
    presence = _column([row.sampling.presence_penalty for row in rows], scores)
    return scores - frequency * generated - presence * (generated > 0)


def _count_generated(rows: Seq[Row], like: Tensor) -> Tensor:
    """How often each token occurs in each row's prefix after the prompt, drafts included: `[R, V]`."""
    counts = _count_by_sequence(rows, like, lambda row: row.token_ids[row.num_prompt_tokens :])
    if any(row.draft_ids for row in rows):
        counts += _histograms([row.draft_ids for row in rows], like)
    return counts


def _count_prompt(rows: Seq[Row], like: Tensor) -> Tensor:
    return _count_by_sequence(rows, like, lambda row: row.token_ids[: row.num_prompt_tokens])


def _count_by_sequence(rows: Seq[Row], like: Tensor, part: Callable[[Row], Seq[int]]) -> Tensor:
    """Count one part of the committed tokens once per sequence, for all of its rows: `[R, V]`."""
    first_rows: dict[int, Row] = {}  # rows of one sequence share their list of committed tokens
    for row in rows:
        first_rows.setdefault(id(row.token_ids), row)
    counts = _histograms([part(row) for row in first_rows.values()], like)  # [sequences, V]
    places = {key: place for place, key in enumerate(first_rows)}
    return counts[[places[id(row.token_ids)] for row in rows]]


def _histograms(parts: Seq[Seq[int]], like: Tensor) -> Tensor:
    """Occurrences of each token in each part, `[parts, V]`; ids beyond V are left out, for a draft may know fewer."""
    num_tokens = like.shape[1]
    token_ids = torch.tensor(list(chain.from_iterable(parts)), dtype=torch.int64, device=like.device)
    sizes = torch.tensor([len(part) for part in parts], device=like.device)
    places = torch.arange(len(parts), device=like.device).repeat_interleave(sizes) * num_tokens + token_ids
    counts = torch.bincount(places[token_ids < num_tokens], minlength=len(parts) * num_tokens)
    return counts.view(len(parts), num_tokens).to(like.dtype)


def _column(values: list[float], like: Tensor) -> Tensor:
    return upload(values, like.dtype, like.device)[:, None]  # [R, 1]
