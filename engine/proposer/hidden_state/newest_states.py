"""The states that heads draft from: per open sequence, the state behind its newest token but one."""

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
    """A state [S], and the number of committed tokens that it stands before the end of."""

    state: Tensor
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Queries that can be drafted for, and their states [B, S]."""

    queries: list[DraftQuery]
    states: Tensor


class NewestStates:
    """Follows the open sequences of one proposer. A state is used for exactly the tokens that it was computed for."""

    def __init__(self) -> None:
        self._newest: dict[str, _Newest | None] = {}

    def open(self, sequence: RequestTokens) -> None:
        self._newest[sequence.request_id] = None

    def close(self, request_id: str) -> None:
        self._newest.pop(request_id, None)

    def keep(self, passed: Seq[PassedRows], states: Tensor) -> None:
        """`states` [B, S] belong to the last rows of `passed`, whose sequences have all sampled."""
        for each, state in zip(passed, states, strict=True):
            if each.sequence.request_id in self._newest:
                self._newest[each.sequence.request_id] = _Newest(state, each.num_tokens)

    def of(self, queries: Seq[DraftQuery]) -> Ready | None:
        """The queries whose state is here, in order; None where none is."""
        found = [(query, newest) for query in queries if (newest := self._of(query.sequence)) is not None]
        if not found:
            return None
        return Ready([query for query, _ in found], torch.stack([newest.state for _, newest in found]))

    def _of(self, sequence: RequestTokens) -> _Newest | None:
        newest = self._newest.get(sequence.request_id)
        return newest if newest is not None and newest.num_tokens == len(sequence.token_ids) else None
