"""What a request adds to or forbids among the tokens: logit bias, bad words, and stop tokens that come too early."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.row import Row


def has_bias(row: Row) -> bool:
    return bool(row.sampling.logit_bias)


def add_bias(scores: Tensor, rows: Seq[Row]) -> Tensor:
    """Add `logit_bias`; a repeated id counts each time, an id outside the vocabulary not at all."""
    biases = [(index, token_id, bias) for index, row in enumerate(rows) for token_id, bias in row.sampling.logit_bias]
    biases = [entry for entry in biases if entry[1] < scores.shape[1]]
    values = torch.tensor([bias for _, _, bias in biases], dtype=scores.dtype, device=scores.device)
    places = _index([(index, token_id) for index, token_id, _ in biases], scores)
    return scores.index_put(places, values, accumulate=True)


def has_banned_tokens(row: Row) -> bool:
    return bool(row.sampling.bad_words) or row.num_generated < row.sampling.min_tokens


def mask_banned_tokens(scores: Tensor, rows: Seq[Row]) -> Tensor:
    """-inf for the last token of each bad word that the prefix has begun, and for stop tokens before `min_tokens`."""
    banned = [(index, token_id) for index, row in enumerate(rows) for token_id in _banned_tokens(row)]
    banned = [entry for entry in banned if entry[1] < scores.shape[1]]
    return scores.index_put(_index(banned, scores), scores.new_tensor(-math.inf))


def _banned_tokens(row: Row) -> Iterable[int]:
    yield from (word[-1] for word in row.sampling.bad_words if word and row.ends_with(word[:-1]))
    if row.num_generated < row.sampling.min_tokens:
        yield from row.sampling.stop_token_ids


def _index(entries: Seq[tuple[int, int]], scores: Tensor) -> tuple[Tensor, Tensor]:
    index = torch.tensor(entries, dtype=torch.int64, device=scores.device).reshape(-1, 2)
    return index[:, 0], index[:, 1]
