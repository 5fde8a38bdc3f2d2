"""One of the target's sequences, as far as the draft process knows it."""

from __future__ import annotations

from actors.channel.draft_messages import Commit, Open
from actors.channel.offer_table import OfferTable
from engine.draft import Draft
from engine.sequence.request_tokens import RequestTokens

_NEVER = -1


class SyncedSequence:
    """A sequence of the target's, how much of it the draft process was told, and what the draft has offered."""

    def __init__(self, sequence: RequestTokens) -> None:
        self.sequence = sequence
        self.offers = OfferTable(sequence.token_ids)
        self._told_len = 0
        self._asked_len = _NEVER

    @property
    def is_told(self) -> bool:
        """True if the draft process has an `Open` of it."""
        return self._told_len > 0

    @property
    def has_news(self) -> bool:
        """True if more is committed than the draft process was told."""
        return self._told_len < len(self.sequence.token_ids)

    @property
    def draft(self) -> Draft | None:
        """The offer on top of exactly what is committed now, if there is one."""
        return self.offers.draft

    @property
    def is_awaited(self) -> bool:
        """True if drafts were asked for on top of what is committed now, and have not come."""
        return self._asked_len == len(self.sequence.token_ids) and self.draft is None

    def opening(self) -> Open:
        """Return all committed tokens; the draft is asked to answer only if the sequence decodes already."""
        sequence = self.sequence
        return Open(
            request_id=sequence.request_id,
            token_ids=tuple(sequence.token_ids),
            num_prompt_tokens=sequence.num_prompt_tokens,
            sampling=sequence.sampling,
            sample_index=sequence.request.sample_index,
            verify=sequence.verify,
            num_drafts=sequence.num_wanted_drafts,
            is_next=sequence.num_computed_tokens > 0,
            cache_salt=sequence.request.cache_salt,
            tenant=sequence.request.tenant,
        )

    def commit(self) -> Commit:
        """Return a message with the tokens committed since the draft was told last."""
        new_ids = tuple(self.sequence.token_ids[self._told_len :])
        return Commit(self.sequence.request_id, self._told_len, new_ids, self.sequence.num_wanted_drafts)

    def was_told(self) -> None:
        """An `opening` or a `commit` has been sent."""
        self._told_len = len(self.sequence.token_ids)

    def was_asked(self) -> None:
        """The commit that has been sent is waited for."""
        self._asked_len = self._told_len

    def forget(self) -> None:
        """The draft process knows nothing of it (any more)."""
        self._told_len = 0
        self._asked_len = _NEVER
