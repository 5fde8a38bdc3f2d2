"""Tokens that a request favours or forbids: bias, grammar, bad words, stop tokens that come too early."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import embedding

from engine.indexing import send, upload
from engine.sampling.logits_row import LogitsRow
from protos.messages import SamplingParams


def has_bias(sampling: SamplingParams) -> bool:
    """True if the request has a `logit_bias`."""
    return bool(sampling.logit_bias)


def add_bias(scores: Tensor, rows: Seq[LogitsRow]) -> Tensor:
    """Add `logit_bias`; a repeated id counts each time, an id outside the vocabulary not at all."""
    biases = [(index, token_id, bias) for index, row in enumerate(rows) for token_id, bias in row.sampling.logit_bias]
    biases = [entry for entry in biases if entry[1] < scores.shape[1]]
    values = upload([bias for _, _, bias in biases], scores.dtype, scores.device)
    places = _index([(index, token_id) for index, token_id, _ in biases], scores)
    return scores.index_put(places, values, accumulate=True)


def may_have_mask(sampling: SamplingParams) -> bool:
    """True of all: a row has a mask where its proposer or its verifier gave it one."""
    return True


def has_mask(row: LogitsRow) -> bool:
    """True if a grammar constrains the row."""
    return row.mask is not None


def mask_forbidden_tokens(scores: Tensor, rows: Seq[LogitsRow]) -> Tensor:
    """Set to -inf all that the grammar forbids after each row's own prefix, drafts included; all rows have a mask."""
    packed = torch.frombuffer(bytearray(b"".join(row.mask or b"" for row in rows)), dtype=torch.uint8)
    packed = send(packed.view(len(rows), -1), scores.device)  # [R, bytes]
    penalties = embedding(packed.int(), _byte_penalties(scores.device, scores.dtype))  # [R, bytes, 8]
    return scores + penalties.flatten(1)[:, : scores.shape[1]]


@cache
def _byte_penalties(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return what each mask byte adds to its eight tokens, 0 or -inf: `[256, 8]`; five times faster than a fill."""
    is_set = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(is_set == 1, 0.0, -math.inf).to(device, dtype)


def may_ban_tokens(sampling: SamplingParams) -> bool:
    """True if a prefix may come that has banned tokens."""
    return bool(sampling.bad_words) or sampling.min_tokens > 0


def has_banned_tokens(row: LogitsRow) -> bool:
    """True if bad words or an early stop token may be forbidden here."""
    return bool(row.sampling.bad_words) or row.num_generated < row.sampling.min_tokens


def mask_banned_tokens(scores: Tensor, rows: Seq[LogitsRow]) -> Tensor:
    """Set to -inf the last token of each bad word that the prefix has begun, and stop tokens before `min_tokens`.

    Where they are all that a grammar allows, the grammar wins: they stay possible.
    """
    banned = [(index, token_id) for index, row in enumerate(rows) for token_id in _banned_tokens(row)]
    banned = [entry for entry in banned if entry[1] < scores.shape[1]]
    masked = scores.index_put(_index(banned, scores), scores.new_full((), -math.inf))
    if not any(has_mask(row) for row in rows):
        return masked
    return torch.where(masked.isneginf().all(dim=1, keepdim=True), scores, masked)


def _banned_tokens(row: LogitsRow) -> Iterable[int]:
    yield from (word[-1] for word in row.sampling.bad_words if word and row.ends_with(word[:-1]))
    if row.num_generated < row.sampling.min_tokens:
        yield from row.sampling.stop_token_ids


def _index(entries: Seq[tuple[int, int]], scores: Tensor) -> tuple[Tensor, Tensor]:
    index = upload(entries, torch.int64, scores.device).reshape(-1, 2)
    return index[:, 0], index[:, 1]
