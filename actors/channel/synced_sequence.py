"""One of the target's sequences, and the part of it that the draft process knows."""

from __future__ import annotations

from actors.channel.draft_messages import Commit, Open
from actors.channel.offer_table import OfferTable
from engine.batch.draft import Draft
from engine.sequence.request_tokens import RequestTokens

_NEVER = -1


class SyncedSequence:
    """A sequence of the target's, the length that was sent to the draft process, and the draft's offers."""

    def __init__(self, sequence: RequestTokens) -> None:
        self.sequence = sequence
        self.offers = OfferTable(sequence.token_ids)
        self._sent_len = 0
        self._awaited_len = _NEVER

    @property
    def is_opened(self) -> bool:
        """True if the draft process has got its `Open`."""
        return self._sent_len > 0

    @property
    def has_news(self) -> bool:
        """True if there are committed tokens that were not sent yet."""
        return self._sent_len < len(self.sequence.token_ids)

    @property
    def draft(self) -> Draft | None:
        """The draft that continues the committed tokens, if one was offered."""
        return self.offers.draft

    @property
    def is_awaited(self) -> bool:
        """True if drafts of the committed tokens were requested and have not arrived."""
        return self._awaited_len == len(self.sequence.token_ids) and self.draft is None

    def opening(self) -> Open:
        """Return all committed tokens; drafts are requested only if the sequence already decodes."""
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
        """Return a message with the tokens committed since the last message."""
        new_ids = tuple(self.sequence.token_ids[self._sent_len :])
        return Commit(self.sequence.request_id, self._sent_len, new_ids, self.sequence.num_wanted_drafts)

    def mark_sent(self) -> None:
        """Note that an `opening` or a `commit` was sent."""
        self._sent_len = len(self.sequence.token_ids)

    def mark_awaited(self) -> None:
        """Note that drafts of the commit just sent are awaited."""
        self._awaited_len = self._sent_len

    def forget(self) -> None:
        """Note that the draft process does not know the sequence (any more)."""
        self._sent_len = 0
        self._awaited_len = _NEVER
