"""The offers for one sequence that may still come true, on both ends of the channel."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.batch.draft import Draft
from engine.proposer.draft_model.offer import Offer

_MAX_OFFERS = 1024  # far more than any fan-out; a faulty draft must not fill the memory


class OfferTable:
    """Finds the offer that continues exactly the committed tokens.

    `token_ids` are the sequence's committed tokens; the list grows elsewhere. Offers arrive in the order of the commits
    they build on, so the first offer on a newer commit drops all earlier offers. Only the offer that came true is kept,
    since the pass that verifies it may not have begun.
    """

    def __init__(self, token_ids: Seq[int]) -> None:
        self._token_ids = token_ids
        self._base_len = 0
        self._drafts: dict[tuple[int, ...], Draft] = {}  # by the tokens after the first `_base_len`

    @property
    def draft(self) -> Draft | None:
        """The draft that continues the committed tokens, if one was offered."""
        return self._drafts.get(tuple(self._token_ids[self._base_len :]))

    def add(self, offer: Offer) -> bool:
        """Keep an offer; return False if it is stale, so that no committed tokens can match it any more."""
        since = tuple(self._token_ids[offer.base_len :])
        is_possible = self._base_len <= offer.base_len <= len(self._token_ids) and offer.after[: len(since)] == since
        if not is_possible or len(self._drafts) >= _MAX_OFFERS:
            return False
        if offer.base_len > self._base_len:
            self._move_to(offer.base_len)
        self._drafts[offer.after] = offer.draft
        return True

    def _move_to(self, base_len: int) -> None:
        draft = self.draft
        self._base_len = base_len
        self._drafts = {} if draft is None else {tuple(self._token_ids[base_len:]): draft}
