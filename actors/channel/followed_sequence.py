"""One of the target's sequences, as far as the draft process knows it."""

from __future__ import annotations

from actors.channel.draft_messages import Commit, Open
from actors.channel.offer_table import OfferTable
from engine.draft import Draft
from engine.sequence.sequence import Sequence

_NEVER = -1


class FollowedSequence:
    """What was told of a sequence, and what the draft has offered; the committed tokens are those of `sequence`."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.offers = OfferTable(sequence.token_ids)
        self._told_len = 0
        self._asked_len = _NEVER

    @property
    def is_told(self) -> bool:
        """The draft process has an `Open` of it."""
        return self._told_len > 0

    @property
    def has_news(self) -> bool:
        """More is committed than the draft process was told."""
        return self._told_len < len(self.sequence.token_ids)

    @property
    def draft(self) -> Draft | None:
        """What was offered on top of exactly what is committed now."""
        return self.offers.draft

    @property
    def is_awaited(self) -> bool:
        """Drafts were asked for on top of what is committed now, and have not come."""
        return self._asked_len == len(self.sequence.token_ids) and self.draft is None

    def opening(self) -> Open:
        """All committed tokens. The draft is asked to answer only if the sequence decodes already."""
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
        )

    def commit(self) -> Commit:
        """The tokens committed since the draft was told last."""
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
