"""The hidden states that heads draft from: one per open sequence, of the row that sampled its newest token."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.proposer.passed_rows import PassedRows
from engine.sequence.draft_query import DraftQuery
from engine.sequence.request_tokens import RequestTokens


@dataclass(frozen=True, slots=True)
class _Newest:
    """A state, `[S]`, and the number of committed tokens that it was computed for."""

    state: Tensor
    num_tokens: int


@dataclass(frozen=True, slots=True)
class DraftableQueries:
    """Queries with a state, and their states, `[B, S]`."""

    queries: list[DraftQuery]
    states: Tensor


class NewestStates:
    """The states of a proposer's open sequences. A state is used only for the tokens that it was computed for."""

    def __init__(self) -> None:
        self._newest: dict[str, _Newest | None] = {}

    def open(self, sequence: RequestTokens) -> None:
        self._newest[sequence.request_id] = None

    def close(self, request_id: str) -> None:
        self._newest.pop(request_id, None)

    def keep(self, passed: Seq[PassedRows], states: Tensor) -> None:
        """Keep `states [B, S]`, which belong to the last rows of `passed`; all these sequences have sampled."""
        for each, state in zip(passed, states, strict=True):
            if each.sequence.request_id in self._newest:
                self._newest[each.sequence.request_id] = _Newest(state, each.num_tokens)

    def of(self, queries: Seq[DraftQuery]) -> DraftableQueries | None:
        """Return the queries that have a current state, in order; None if no query has one."""
        found = [(query, newest) for query in queries if (newest := self._of(query.sequence)) is not None]
        if not found:
            return None
        return DraftableQueries([query for query, _ in found], torch.stack([newest.state for _, newest in found]))

    def _of(self, sequence: RequestTokens) -> _Newest | None:
        newest = self._newest.get(sequence.request_id)
        return newest if newest is not None and newest.num_tokens == len(sequence.token_ids) else None
