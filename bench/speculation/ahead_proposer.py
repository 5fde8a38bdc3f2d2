"""Drafting ahead without a second process or a clock: every outcome has all the time it takes to be prepared."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.batch.draft import Draft
from engine.proposer.draft_model.ahead_drafter import PendingPass
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.proposer.draft_model.offer import Offer
from engine.sequence.draft_query import DraftQuery
from engine.sequence.request_tokens import RequestTokens


class AheadProposer:
    """Prepares for every verdict, and asks the draft only for outcomes that were not foreseen; implements `Proposer`.

    `num_lookups` counts the passes that wanted drafts behind another, `num_hits` those that found them prepared.
    """

    def __init__(self, proposer: ModelProposer, fan_out: int) -> None:
        self.num_lookups = 0
        self.num_hits = 0
        self._proposer = proposer
        self._ahead_drafter = proposer.ahead_drafter(fan_out)
        self._prepared: dict[str, dict[tuple[int, ...], Draft]] = {}  # by all tokens that are committed then

    def open(self, sequence: RequestTokens) -> None:
        self._proposer.open(sequence)

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        found = [self._find(query.sequence) for query in queries]
        missing = [query for query, draft in zip(queries, found, strict=True) if draft is None]
        made = iter(self._proposer.propose(missing))
        drafts = [next(made) if draft is None else draft for draft in found]
        self._draft_ahead(queries, drafts)
        return [
            Draft(draft.token_ids[: query.max_draft_tokens], draft.distributions[: query.max_draft_tokens])
            for query, draft in zip(queries, drafts, strict=True)
        ]

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        self._proposer.commit(sequences)

    def close(self, request_id: str) -> None:
        self._proposer.close(request_id)
        self._prepared.pop(request_id, None)

    def _find(self, sequence: RequestTokens) -> Draft | None:
        prepared = self._prepared.get(sequence.request_id)
        if prepared is None:
            return None
        draft = prepared.get(tuple(sequence.token_ids))
        self.num_lookups += 1
        self.num_hits += draft is not None
        return draft

    def _draft_ahead(self, queries: Seq[DraftQuery], drafts: Seq[Draft]) -> None:
        texts = {query.sequence.request_id: tuple(query.sequence.token_ids) for query in queries}
        self._prepared |= {request_id: {} for request_id in texts}
        pending = [
            PendingPass(query.sequence, draft.token_ids, query.sequence.num_draft_tokens)
            for query, draft in zip(queries, drafts, strict=True)
        ]

        def keep(wave: tuple[Offer, ...]) -> None:
            for each in wave:
                self._prepared[each.request_id][(*texts[each.request_id], *each.after)] = each.draft

        self._ahead_drafter.run(pending, keep, lambda: False)
