"""Several proposers behind one: each sequence is drafted for by those of its method, in order of rank."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from engine.draft import NO_DRAFT, Draft
from engine.proposer import Proposer
from engine.sequence.draft_query import DraftQuery
from engine.sequence.request_tokens import RequestTokens
from protos.messages import SpeculationMethod

Ranking = tuple[Proposer, ...]


@dataclass(slots=True)
class _Followed:
    """An open sequence, and which of its proposers know it: those of rank below `num_met`."""

    sequence: RequestTokens
    ranking: Ranking
    num_met: int = field(default=0)


class MethodDispatcher:
    """Asks, per sequence, the first proposer of its method, and the next one where that has no draft.

    The first hears of every sequence and every commit. The others meet a sequence when they are first needed, so a
    stand-in for a draft process that may be away costs nothing while it is there. Whether a proposer has a draft must
    not depend on what the draft would say: then the choice does not either, and every verifier stays exact. A method
    that is not here has no drafts.
    """

    def __init__(self, methods: Mapping[SpeculationMethod, Ranking]) -> None:
        self._methods = methods
        self._followed: dict[str, _Followed] = {}

    def open(self, sequence: RequestTokens) -> None:
        ranking = self._methods.get(sequence.method, ())
        if ranking:
            followed = self._followed[sequence.request_id] = _Followed(sequence, ranking)
            _meet(followed, 0)

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        drafts = [NO_DRAFT] * len(queries)
        rank = 0
        while asked := self._proposers(queries, drafts, rank):
            for proposer, indices in asked.items():
                answers = proposer.propose([queries[index] for index in indices])
                for index, draft in zip(indices, answers, strict=True):
                    drafts[index] = draft
            rank += 1
        return drafts

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        told: dict[Proposer, list[RequestTokens]] = {}
        for sequence in sequences:
            followed = self._followed.get(sequence.request_id)
            if followed is not None:
                told.setdefault(followed.ranking[0], []).append(sequence)
        for proposer, members in told.items():
            proposer.commit(members)

    def close(self, request_id: str) -> None:
        followed = self._followed.pop(request_id, None)
        if followed is not None:
            for proposer in followed.ranking[: followed.num_met]:
                proposer.close(request_id)

    def _proposers(self, queries: Seq[DraftQuery], drafts: Seq[Draft], rank: int) -> dict[Proposer, list[int]]:
        """Who is to be asked for which queries, now that all of lower rank have answered."""
        asked: dict[Proposer, list[int]] = {}
        for index, (query, draft) in enumerate(zip(queries, drafts, strict=True)):
            followed = self._followed.get(query.sequence.request_id)
            if followed is not None and not draft.token_ids and rank < len(followed.ranking):
                _meet(followed, rank)
                asked.setdefault(followed.ranking[rank], []).append(index)
        return asked


def _meet(followed: _Followed, rank: int) -> None:
    """See to it that the proposer of this rank knows the sequence as it is now; the first is told by `commit`."""
    if rank >= followed.num_met:
        followed.ranking[rank].open(followed.sequence)
        followed.num_met = rank + 1
    elif rank > 0:
        followed.ranking[rank].commit((followed.sequence,))
