"""Dispatches each sequence to the proposers of its method, in order of rank."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import MappingProxyType

from engine.batch.draft import NO_DRAFT, Draft
from engine.proposer import Proposer
from engine.proposer.dispatch.hybrid_proposer import HybridProposer
from engine.proposer.text_match.ngram import NgramProposer
from engine.proposer.text_match.suffix import SuffixProposer
from engine.proposer.text_match.text_matcher import PredictionMatcher
from engine.sequence.checked_draft import DraftQuery
from engine.sequence.request_tokens import RequestTokens
from protos.messages import SpeculationMethod

Ranking = tuple[Proposer, ...]


@dataclass(slots=True)
class _OpenSequence:
    """An open sequence and the proposers of its method; ranks below `num_opened` have opened it."""

    sequence: RequestTokens
    ranking: Ranking
    num_opened: int = 0


class MethodDispatcher:
    """Calls the first proposer of a sequence's method, and the next one if it has no draft.

    The first proposer gets every sequence and every commit. The others open a sequence when they are first needed, so
    a substitute for a draft process costs nothing while that process runs. Whether a proposer has a draft must not
    depend on the draft's tokens; then the choice does not either, and every verifier stays exact. An unknown method
    has no drafts.
    """

    def __init__(self, methods: Mapping[str, Ranking]) -> None:
        self._methods = methods
        self._sequences: dict[str, _OpenSequence] = {}

    def open(self, sequence: RequestTokens) -> None:
        """Open the sequence in the first proposer of its method."""
        ranking = self._methods.get(sequence.method, ())
        if ranking:
            opened = self._sequences[sequence.request_id] = _OpenSequence(sequence, ranking)
            _ensure_open(opened, 0)

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        """Ask rank by rank for drafts of the queries that have no draft yet."""
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
        """Commit in the first proposer of each sequence's method."""
        by_proposer: dict[Proposer, list[RequestTokens]] = {}
        for sequence in sequences:
            opened = self._sequences.get(sequence.request_id)
            if opened is not None:
                by_proposer.setdefault(opened.ranking[0], []).append(sequence)
        for proposer, members in by_proposer.items():
            proposer.commit(members)

    def close(self, request_id: str) -> None:
        """Close the sequence in all proposers that opened it."""
        opened = self._sequences.pop(request_id, None)
        if opened is not None:
            for proposer in opened.ranking[: opened.num_opened]:
                proposer.close(request_id)

    def _proposers(self, queries: Seq[DraftQuery], drafts: Seq[Draft], rank: int) -> dict[Proposer, list[int]]:
        """Return the proposers of this rank, each with the indices of its queries without a draft."""
        asked: dict[Proposer, list[int]] = {}
        for index, (query, draft) in enumerate(zip(queries, drafts, strict=True)):
            opened = self._sequences.get(query.sequence.request_id)
            if opened is not None and not draft.token_ids and rank < len(opened.ranking):
                _ensure_open(opened, rank)
                asked.setdefault(opened.ranking[rank], []).append(index)
        return asked


def _ensure_open(opened: _OpenSequence, rank: int) -> None:
    """Open the sequence in the proposer of this rank, or commit its tokens there; rank 0 gets them from `commit`."""
    if rank >= opened.num_opened:
        opened.ranking[rank].open(opened.sequence)
        opened.num_opened = rank + 1
    elif rank > 0:
        opened.ranking[rank].commit((opened.sequence,))


def proposer_of(
    methods: Collection[str],
    model: Proposer | None = None,
    model_method: SpeculationMethod = SpeculationMethod.MODEL,
    others: Mapping[str, Proposer] = MappingProxyType({}),
) -> Proposer | None:
    """Return one proposer for all of `methods`; None if they only allow plain decoding.

    `model`, a draft model or a head, drafts for `model_method`; n-grams replace it while it has no draft. A request's
    prediction takes precedence. `others` are further draft models, by the names of their methods.
    """
    suffix, ngram = SuffixProposer(), NgramProposer()
    rankings: dict[str, Ranking] = {
        SpeculationMethod.SUFFIX: (suffix,),
        SpeculationMethod.NGRAM: (ngram,),
        **{name: (draft, ngram) for name, draft in others.items()},
    }
    if model is not None:
        rankings[model_method] = (model, ngram)
        rankings[SpeculationMethod.HYBRID] = (HybridProposer(suffix, model), ngram)
    offered = {method: ranking for method, ranking in rankings.items() if method in methods}
    return HybridProposer(PredictionMatcher(), MethodDispatcher(offered)) if offered else None
