"""Repetition, frequency and presence penalties, from the counts of each row's own prefix.

The prefix of a draft row holds the drafts before it. Taking the committed tokens alone for all rows is cheaper and
wrong: the second draft would be judged by another distribution than plain decoding uses.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import chain

import torch
from torch import Tensor

from engine.indexing import index_tensor, upload
from engine.sampling.logits_row import LogitsRow
from protos.messages import SamplingParams


def has_penalties(sampling: SamplingParams) -> bool:
    """True if any of the three penalties is not neutral."""
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


def penalize(scores: Tensor, rows: Seq[LogitsRow]) -> Tensor:
    """Penalise repetition (CTRL, arXiv:1909.05858), then frequency and presence as OpenAI; `[R, V]` -> `[R, V]`."""
    samplings = [row.sampling for row in rows]
    if any(sampling.repetition_penalty != 1.0 for sampling in samplings):
        repetition = _column([sampling.repetition_penalty for sampling in samplings], scores)
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(_is_seen(rows, scores), repeated, scores)
    if any(sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0 for sampling in samplings):
        generated = _count_generated(rows, scores)  # [R, V]
        frequency = _column([sampling.frequency_penalty for sampling in samplings], scores)
        presence = _column([sampling.presence_penalty for sampling in samplings], scores)
        scores = scores - frequency * generated - presence * (generated > 0)
    return scores


def _is_seen(rows: Seq[LogitsRow], like: Tensor) -> Tensor:
    """Return which tokens each row's prefix has, prompt and drafts included: `[R, V] bool`."""
    first_rows, indices = _sequences_of(rows)
    num_tokens = like.shape[1]
    seen = torch.zeros(len(first_rows), num_tokens + 1, dtype=torch.bool, device=like.device)
    for index, row in enumerate(first_rows):  # the last column is for ids beyond V
        seen[index].index_fill_(0, index_tensor(row.token_ids, like.device).clamp_(max=num_tokens), True)
    seen = seen[indices]  # [R, V + 1]
    for index, row in enumerate(rows):
        if row.draft_ids:
            seen[index].index_fill_(0, index_tensor(row.draft_ids, like.device).clamp_(max=num_tokens), True)
    return seen[:, :num_tokens]


def _count_generated(rows: Seq[LogitsRow], like: Tensor) -> Tensor:
    """Count how often each token occurs in each row's prefix after the prompt, drafts included: `[R, V]`."""
    first_rows, indices = _sequences_of(rows)
    counts = _histograms([row.token_ids[row.num_prompt_tokens :] for row in first_rows], like)[indices]
    if any(row.draft_ids for row in rows):
        counts += _histograms([row.draft_ids for row in rows], like)
    return counts


def _sequences_of(rows: Seq[LogitsRow]) -> tuple[list[LogitsRow], list[int]]:
    """Return a row of each sequence, so that its committed tokens are read once, and each row's index among these."""
    first_rows: dict[int, LogitsRow] = {}  # rows of one sequence share their list of committed tokens
    for row in rows:
        first_rows.setdefault(id(row.token_ids), row)
    indices = {key: index for index, key in enumerate(first_rows)}
    return list(first_rows.values()), [indices[id(row.token_ids)] for row in rows]


def _histograms(parts: Seq[Seq[int]], like: Tensor) -> Tensor:
    """Count each token in each part, `[parts, V]`; ids beyond V are left out, for a draft may know fewer."""
    num_columns = like.shape[1] + 1  # the last one is for ids beyond V
    token_ids = index_tensor(chain.from_iterable(parts), like.device).clamp_(max=num_columns - 1)
    first_places = (index * num_columns for index, part in enumerate(parts) for _ in part)
    places = index_tensor(first_places, like.device) + token_ids
    counts = like.new_zeros(len(parts) * num_columns)
    return counts.index_add_(0, places, like.new_ones(len(places))).view(len(parts), -1)[:, :-1]


def _column(values: list[float], like: Tensor) -> Tensor:
    return upload(values, like.dtype, like.device)[:, None]  # [R, 1]
