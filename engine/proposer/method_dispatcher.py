"""Dispatches each sequence to the proposers of its method, in order of rank; a hybrid chooses between two per pass."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from engine.accounting.acceptance import AcceptanceTable
from engine.batch.draft import NO_DRAFT, Draft
from engine.proposer import Proposer
from engine.proposer.text_match.suffix import SuffixProposer
from engine.proposer.text_match.text_matcher import NgramProposer, PredictionMatcher, TextMatcher
from engine.sequence.batch import DraftQuery
from engine.sequence.sequence import RequestTokens
from protos.messages import SpeculationMethod

_MAX_LENGTH = 64  # positions of a draft with their own acceptance


@dataclass(slots=True)
class _HybridDraft:
    """The draft of a sequence's next pass; turns of one `kind` share their acceptance."""

    kind: str
    base_len: int
    token_ids: tuple[int, ...] = ()
    is_match: bool = False


class HybridProposer:
    """Proposes the match of `matcher` if its expected acceptance is at least that expected from `other`.

    The choice is made at the commit. If it is the match, `other` is not called: it does no work, and catches up at its
    next call. The acceptance of matches is known by the length of the matched context, and the acceptance of `other`
    for greedy and for sampled requests. So the choice depends on committed tokens and counts only, never on a draft
    that `other` has drawn, and every verifier stays exact. Sequences outside `matcher.is_for` go to `other`.
    """

    def __init__(self, matcher: TextMatcher, other: Proposer) -> None:
        self._matcher = matcher
        self._other = other
        self._acceptance = AcceptanceTable(_MAX_LENGTH)
        self._turns: dict[str, _HybridDraft | None] = {}  # by sequence that the matcher is for
        self._num_passed_over: dict[str, int] = {}

    def open(self, sequence: RequestTokens) -> None:
        if self._matcher.is_for(sequence):
            self._matcher.open(sequence)
            self._turns[sequence.request_id] = None
        self._other.open(sequence)

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        """Return the matches chosen at the commit, and the drafts of `other` for all other queries."""
        turns = [self._current_turn(query.sequence) for query in queries]
        asked = [query for query, turn in zip(queries, turns, strict=True) if turn is None or not turn.is_match]
        answers = iter(self._other.propose(asked) if asked else ())
        drafts = []
        for query, turn in zip(queries, turns, strict=True):
            if turn is None:
                drafts.append(next(answers))
                continue
            if turn.is_match:
                draft = Draft(turn.token_ids[: query.max_draft_tokens], source=self._matcher.source)
            else:
                draft = next(answers)
            # The committed tokens do not show the acceptance of a tree.
            turn.token_ids = () if draft.parents else draft.token_ids
            drafts.append(draft)
        return drafts

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        """Record the acceptance of the last drafts, and choose for the next pass."""
        matchable = [sequence for sequence in sequences if sequence.request_id in self._turns]
        for sequence in matchable:
            self._learn(sequence)
        self._matcher.commit(matchable)
        for sequence in matchable:
            self._turns[sequence.request_id] = self._next_turn(sequence)
        asked = [each for each in sequences if (turn := self._turns.get(each.request_id)) is None or not turn.is_match]
        if asked:
            self._other.commit(asked)

    def close(self, request_id: str) -> None:
        if request_id in self._turns:
            del self._turns[request_id]
            self._matcher.close(request_id)
        self._other.close(request_id)

    def forget_draft(self) -> None:
        """Forget all acceptance, since another model drafts now; the matches are soon measured again."""
        self._acceptance = AcceptanceTable(_MAX_LENGTH)
        if isinstance(self._other, MethodDispatcher):
            self._other.forget_draft()

    def _current_turn(self, sequence: RequestTokens) -> _HybridDraft | None:
        """Return the turn that was chosen for exactly the tokens committed now."""
        turn = self._turns.get(sequence.request_id)
        return turn if turn is not None and turn.base_len == len(sequence.token_ids) else None

    def _next_turn(self, sequence: RequestTokens) -> _HybridDraft:
        """Choose the next turn; a match reserves its room in the pass."""
        sequence.num_matched = 0
        turn = self._better_turn(sequence)
        if turn.is_match and sequence.num_free_draft_tokens is not None:
            sequence.num_matched = len(turn.token_ids)
        return turn

    def _better_turn(self, sequence: RequestTokens) -> _HybridDraft:
        base_len = len(sequence.token_ids)
        other_kind = "other, greedy" if sequence.is_greedy else "other, sampled"
        match = self._matcher.match(sequence, min(sequence.num_wanted_matches, _MAX_LENGTH))
        if match is None:
            return _HybridDraft(other_kind, base_len)
        token_ids, match_len = match
        kind = f"match of {min(match_len.bit_length(), 5)} bits"  # 16 tokens or more are one kind
        expected = self._expected_tokens(kind, len(token_ids))
        if expected < self._expected_tokens(other_kind, sequence.num_wanted_drafts) and not self._is_retried(kind):
            return _HybridDraft(other_kind, base_len)
        return _HybridDraft(kind, base_len, token_ids, is_match=True)

    def _expected_tokens(self, kind: str, num_drafts: int) -> float:
        return sum(self._acceptance.of([kind], [kind], [0])[0][:num_drafts])

    def _is_retried(self, kind: str) -> bool:
        self._num_passed_over[kind] = self._num_passed_over.get(kind, 0) + 1
        # A kind of match with a lower expectation is still tried once in 32 times.
        return self._num_passed_over[kind] % 32 == 0

    def _learn(self, sequence: RequestTokens) -> None:
        """Count the accepted tokens of the last turn's draft, unless it was never verified."""
        turn = self._turns[sequence.request_id]
        if turn is None or not turn.token_ids or turn.base_len >= len(sequence.token_ids):
            return
        committed = sequence.token_ids[turn.base_len : turn.base_len + len(turn.token_ids)]
        num_drafts = min(len(turn.token_ids), _MAX_LENGTH)
        equal = np.equal(committed, turn.token_ids[: len(committed)])
        num_accepted = min(int(np.cumprod(equal).sum()), num_drafts)
        self._acceptance.observe([turn.kind], [turn.kind], [num_drafts], [num_accepted])


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

    def forget_draft(self) -> None:
        """Forget the acceptance that hybrids have measured."""
        for proposer, *_ in self._methods.values():
            if isinstance(proposer, HybridProposer):
                proposer.forget_draft()

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
