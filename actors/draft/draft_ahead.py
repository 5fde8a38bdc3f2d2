"""The async discipline of a draft process: offers for likely outcomes of passes that the target is still verifying."""

from __future__ import annotations

from collections.abc import Callable

from actors.channel.offer_table import OfferTable
from engine.batch.draft import Draft
from engine.proposer.draft_model.ahead_drafter import AheadDrafter, PendingPass
from engine.proposer.draft_model.offer import Offer
from engine.sequence.request_tokens import RequestTokens


class DraftAhead:
    """Offers made ahead, and the sequences that wait for more of them.

    It keeps the same table of offers per sequence as the target, so both sides know without a message which passes
    already have their drafts.
    """

    def __init__(self, drafter: AheadDrafter) -> None:
        self._drafter = drafter
        self._tables: dict[str, OfferTable] = {}
        self._due: dict[str, PendingPass] = {}

    @property
    def has_work(self) -> bool:
        """True if there are outcomes to prepare for."""
        return bool(self._due)

    def open(self, sequence: RequestTokens) -> None:
        """Add a sequence without offers."""
        self._tables[sequence.request_id] = OfferTable(sequence.token_ids)

    def close(self, request_id: str) -> None:
        """Forget a sequence."""
        self._tables.pop(request_id, None)
        self._due.pop(request_id, None)

    def decided(self, request_id: str) -> None:
        """Drop the work that was due for a pass, now that its verdict has come."""
        self._due.pop(request_id, None)

    def offered(self, sequence: RequestTokens) -> Draft | None:
        """Return the draft that was offered ahead for the committed tokens, if any."""
        return self._tables[sequence.request_id].draft

    def expect(self, sequence: RequestTokens, draft: Draft, num_drafts: int) -> None:
        """Prepare for the target's next pass, which verifies `draft`; the pass after it may have `num_drafts`."""
        self._due[sequence.request_id] = PendingPass(sequence, draft.token_ids, num_drafts)

    def run(self, send: Callable[[tuple[Offer, ...]], None], is_stopped: Callable[[], bool]) -> None:
        """Draft for all expected passes and send the offers; return at once when `is_stopped`."""

        def emit(offers: tuple[Offer, ...]) -> None:
            if kept := tuple(offer for offer in offers if self._tables[offer.request_id].add(offer)):
                send(kept)

        if self._drafter.run(tuple(self._due.values()), emit, is_stopped):
            self._due.clear()
