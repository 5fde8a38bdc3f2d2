"""Repetition, frequency and presence penalties, from the token counts of each row's own prefix.

The prefix of a draft row includes the drafts before it. Counting only the committed tokens would be cheaper and wrong:
the second draft would be verified against another distribution than plain decoding samples from.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.batch.indexing import index_tensor, upload
from engine.sampling.logits_row import LogitsRow
from protos.messages import SamplingParams

IN_PROMPT = 1 << 30  # flag of a count: the prompt has the token. The lower bits count its generated occurrences


def has_penalties(sampling: SamplingParams) -> bool:
    """True if any of the three penalties is not neutral."""
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


@dataclass(slots=True)
class _Counted:
    """A sequence's line of the table. It keeps the list of tokens alive, since the list's `id` is the key."""

    token_ids: Seq[int]
    line: int
    num_tokens: int  # counted tokens


class TokenCounts:
    """Token counts of the committed prefixes of sequences, kept on the device between steps.

    The device gets a prompt once, then only the newly committed tokens. A list of tokens, which only grows, identifies
    its sequence. When lines run out, sequences outside the current step lose theirs.
    """

    def __init__(self) -> None:
        self._table = torch.empty(0, 0, dtype=torch.int32)
        self._counted: dict[int, _Counted] = {}
        self._free_lines: list[int] = []

    def count(self, rows: Seq[LogitsRow], like: Tensor) -> tuple[Tensor, list[int]]:
        """Return the counts of committed tokens, valid until the next call, and each row's line.

        The counts are `[lines, V + 1] int32`, with `IN_PROMPT`, for scores `[R, V]` such as `like`. The last column
        counts ids of V and above, since a draft's vocabulary may be smaller.
        """
        sequences = {id(row.token_ids): row for row in rows}
        self._make_room(sequences.keys(), like)
        places: list[int] = []
        for key, row in sequences.items():
            counted = self._counted.get(key)
            if counted is None or counted.num_tokens > len(row.token_ids):
                counted = self._begin(row, self._free_lines.pop() if counted is None else counted.line)
            places += _places(counted.line, row.token_ids[counted.num_tokens :], self._table)
            counted.num_tokens = len(row.token_ids)
        _add_at(self._table, places)
        return self._table, [self._counted[id(row.token_ids)].line for row in rows]

    def _make_room(self, keys: Collection[int], like: Tensor) -> None:
        """Ensure a free line for each sequence of `keys` without a line."""
        num_columns = like.shape[1] + 1
        if (self._table.shape[1], self._table.device) != (num_columns, like.device):
            self._table = _zeros(0, num_columns, like.device)
            self._counted, self._free_lines = {}, []
        if len(keys) - len(keys & self._counted.keys()) <= len(self._free_lines):
            return
        self._counted = {key: counted for key, counted in self._counted.items() if key in keys}
        if (num_new := len(keys) - len(self._table)) > 0:
            with torch.inference_mode(False):
                self._table = torch.cat((self._table, _zeros(num_new, num_columns, like.device)))
        used = {counted.line for counted in self._counted.values()}
        self._free_lines = [line for line in range(len(self._table)) if line not in used]

    def _begin(self, row: LogitsRow, line: int) -> _Counted:
        """Assign `line` to the row's sequence and count its prompt."""
        num_columns = self._table.shape[1]
        prompt_ids = index_tensor(row.token_ids[: row.num_prompt_tokens], self._table.device)
        self._table[line].zero_().index_fill_(0, prompt_ids.clamp_(max=num_columns - 1), IN_PROMPT)
        counted = self._counted[id(row.token_ids)] = _Counted(row.token_ids, line, row.num_prompt_tokens)
        return counted


def penalize(scores: Tensor, rows: Seq[LogitsRow], counts: TokenCounts) -> Tensor:
    """Apply the repetition penalty (CTRL, arXiv:1909.05858), then OpenAI's frequency and presence penalties.

    `[R, V]` -> `[R, V]`.
    """
    samplings = [row.sampling for row in rows]
    table, lines = counts.count(rows, scores)
    found = table.index_select(0, index_tensor(lines, scores.device))
    _add_drafts(found, rows)
    found = found[:, :-1]  # [R, V]
    if any(sampling.repetition_penalty != 1.0 for sampling in samplings):
        repetition = _column([sampling.repetition_penalty for sampling in samplings], scores)
        repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
        scores = torch.where(found > 0, repeated, scores)
    if any(sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0 for sampling in samplings):
        generated = (found & (IN_PROMPT - 1)).to(scores.dtype)
        frequency = _column([sampling.frequency_penalty for sampling in samplings], scores)
        presence = _column([sampling.presence_penalty for sampling in samplings], scores)
        scores = scores - frequency * generated - presence * (generated > 0)
    return scores


def _add_drafts(counts: Tensor, rows: Seq[LogitsRow]) -> None:
    """Add the drafts before each row to its line of `counts`, `[R, V + 1]`."""
    _add_at(counts, [place for line, row in enumerate(rows) for place in _places(line, row.draft_ids, counts)])


def _places(line: int, token_ids: Seq[int], counts: Tensor) -> list[int]:
    """Return the index of each token of a line in the flat `counts`."""
    num_columns = counts.shape[1]
    return [line * num_columns + min(token_id, num_columns - 1) for token_id in token_ids]


def _add_at(counts: Tensor, places: list[int]) -> None:
    if places:
        index = index_tensor(places, counts.device)
        counts.view(-1).index_add_(0, index, torch.ones_like(index, dtype=counts.dtype))


def _zeros(num_lines: int, num_columns: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # the table is also written outside inference mode
        return torch.zeros(num_lines, num_columns, dtype=torch.int32, device=device)


def _column(values: list[float], like: Tensor) -> Tensor:
    return upload(values, like.dtype, like.device)[:, None]  # [R, 1]
