"""Proposers for benchmarks of drafting: one engine tries several in turn, and what one proposed is proposed again."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.batch.draft import NO_DRAFT, Draft
from engine.proposer import Proposer
from engine.proposer.dispatch.no_proposer import NoProposer
from engine.sequence.draft_query import DraftQuery
from engine.sequence.request_tokens import RequestTokens


class SwitchedProposer:
    """Stands for `current`, which may be changed while no sequence is open; remembers all it has proposed."""

    def __init__(self) -> None:
        self.current: Proposer = NoProposer()
        self.recorded: dict[tuple[str, int], Draft] = {}

    def open(self, sequence: RequestTokens) -> None:
        self.current.open(sequence)

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        drafts = self.current.propose(queries)
        for query, draft in zip(queries, drafts, strict=True):
            self.recorded[_pass_of(query)] = draft
        return drafts

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        self.current.commit(sequences)

    def close(self, request_id: str) -> None:
        self.current.close(request_id)


class ReplayProposer(NoProposer):
    """Proposes what was recorded for the same passes: drafts that cost nothing, so that a step is a bare verification.

    `recorded` is read when it is needed, so a run may be recorded after this was made.
    """

    def __init__(self, recorded: dict[tuple[str, int], Draft]) -> None:
        self._recorded = recorded

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        return [self._recorded.get(_pass_of(query), NO_DRAFT) for query in queries]


def _pass_of(query: DraftQuery) -> tuple[str, int]:
    return query.sequence.request_id, len(query.sequence.token_ids)
