"""The offers for one sequence that may still come true, on both ends of the channel."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from engine.draft import Draft
from engine.proposer.draft_model.offer import Offer

_MAX_OFFERS = 1024  # far more than any fan-out; a draft that lies must not fill the memory


class OfferTable:
    """Looks offers up by the tokens they continue; nothing but those very tokens finds one.

    `token_ids` are the committed tokens of the sequence, a list that grows elsewhere. Offers come in the order of the
    commits they build on, so the first on top of a newer one says that those before have had their time; only the one
    that came true is kept, since the pass that verifies it may not have begun.
    """

    def __init__(self, token_ids: Seq[int]) -> None:
        self._token_ids = token_ids
        self._base_len = 0
        self._drafts: dict[tuple[int, ...], Draft] = {}  # by what follows the first `_base_len` tokens

    @property
    def draft(self) -> Draft | None:
        """The draft that continues exactly what is committed now, if one was offered."""
        return self._drafts.get(tuple(self._token_ids[self._base_len :]))

    def add(self, offer: Offer) -> bool:
        """Keep an offer; False if it is stale: what it continues is not, and will not be, what is committed."""
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
