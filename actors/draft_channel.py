"""A draft model in another process, seen by the engine as one more proposer.

Sync discipline: a commit leaves the moment the target has committed, so the draft works while the target finishes its
step and plans the next; `propose` then waits for the offers up to a deadline and goes on with what is there. Nothing
the draft does, or fails to do, changes a token; what it sends is checked by the engine like any other proposal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from actors.draft_link import DraftLink
from actors.draft_messages import Commit, Offer, Offers, Open, Round
from actors.patience import Patience
from actors.shell_messages import DraftChannelStats
from engine.batch import ScheduledSequence
from engine.draft import NO_DRAFT, Draft
from engine.proposer import Proposer
from engine.sequence import Sequence

_NEVER = -1


@dataclass(slots=True)
class _Followed:
    """One sequence as the draft process knows it: its first `told_len` tokens, and the last offer it made."""

    sequence: Sequence
    told_len: int = 0  # 0: this draft process was told nothing
    asked_len: int = _NEVER  # committed length at which a commit last asked for drafts
    offer: Offer | None = None

    @property
    def draft(self) -> Draft | None:
        """The offer, if it continues what is committed now."""
        if self.offer is None or self.offer.base_len != len(self.sequence.token_ids):
            return None
        return self.offer.draft

    @property
    def is_awaited(self) -> bool:
        return self.asked_len == len(self.sequence.token_ids) and self.draft is None


class ChannelProposer:
    """Implements `engine.proposer.Proposer` over the socket at `path`.

    `fallback` proposes where the draft has nothing: it is away, late, or was not asked. For the engine's thread alone.
    """

    def __init__(self, path: Path, fallback: Proposer, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = DraftLink(path, clock)
        self._fallback = fallback
        self._clock = clock
        self._patience = Patience()
        self._followed: dict[str, _Followed] = {}
        self._closes: list[str] = []
        self._opens: list[_Followed] = []
        self._asked_at_s = 0.0
        self._generation = 0
        self._num_stale_offers = 0
        self._num_missed_offers = 0

    @property
    def stats(self) -> DraftChannelStats:
        """What the channel has lived through; may be read from any thread."""
        return DraftChannelStats(
            self._link.is_connected, self._generation, self._num_stale_offers, self._num_missed_offers
        )

    def flush(self) -> None:
        """Send what `open` and `close` have left to say, and meet a draft process that has come back."""
        self._receive(0.0)
        self._send_news(())

    def open(self, sequence: Sequence) -> None:
        self._fallback.open(sequence)
        if sequence.num_draft_tokens == 0:
            return
        followed = _Followed(sequence)
        self._followed[sequence.request_id] = followed
        self._opens.append(followed)

    def propose(self, shares: Seq[ScheduledSequence]) -> list[Draft]:
        self.flush()
        self._await_offers([share for share in shares if share.max_draft_tokens > 0])
        drafts = [self._take(share) for share in shares]
        missing = [index for index, draft in enumerate(drafts) if draft is None]
        substitutes = self._fallback.propose([shares[index] for index in missing])
        found = dict(zip(missing, substitutes, strict=True))
        return [found[index] if draft is None else draft for index, draft in enumerate(drafts)]

    def commit(self, sequences: Seq[Sequence]) -> None:
        self._fallback.commit(sequences)
        known = [self._followed[each.request_id] for each in sequences if each.request_id in self._followed]
        self._send_news([followed for followed in known if followed.told_len > 0])

    def close(self, request_id: str) -> None:
        self._fallback.close(request_id)
        followed = self._followed.pop(request_id, None)
        if followed is not None and followed.told_len > 0:
            self._closes.append(request_id)

    def disconnect(self) -> None:
        """Leave the draft process for good."""
        self._link.close()

    def _send_news(self, grown: Seq[_Followed]) -> None:
        opens = [each for each in self._opens if self._followed.get(each.sequence.request_id) is each]
        if not (self._closes or opens or grown):
            return
        news = Round(tuple(self._closes), tuple(map(_open, opens)), tuple(map(_commit, grown)))
        if not self._link.send(news):
            return  # the next draft process is told everything
        self._closes = []
        self._opens = []
        self._asked_at_s = self._clock()
        for followed in (*opens, *grown):
            followed.told_len = len(followed.sequence.token_ids)
        for followed in grown:
            followed.asked_len = followed.told_len

    def _await_offers(self, shares: Seq[ScheduledSequence]) -> None:
        followed = [self._followed[each] for share in shares if (each := share.sequence.request_id) in self._followed]
        deadline_s = self._clock() + self._patience.allowed_s
        while num_missing := sum(each.is_awaited for each in followed):
            remaining_s = deadline_s - self._clock()
            if remaining_s <= 0 or not self._link.is_connected:
                self._num_missed_offers += num_missing
                self._patience.missed()
                return
            self._receive(remaining_s)

    def _receive(self, timeout_s: float) -> None:
        for message in self._link.receive(timeout_s):
            self._patience.answered(self._clock() - self._asked_at_s)
            self._keep(message)
        if self._generation != self._link.generation:
            self._generation = self._link.generation
            self._start_over()

    def _keep(self, message: Offers) -> None:
        for offer in message.offers:
            followed = self._followed.get(offer.request_id)
            if followed is None or offer.base_len != len(followed.sequence.token_ids):
                self._num_stale_offers += 1
            else:
                followed.offer = offer
        self._replay([self._followed[each] for each in message.lost if each in self._followed])

    def _start_over(self) -> None:
        """A new draft process has greeted, and knows nothing."""
        self._closes = []
        self._opens = []
        self._patience = Patience()
        self._replay(list(self._followed.values()))

    def _replay(self, forgotten: list[_Followed]) -> None:
        """Tell the draft all that is committed of sequences it does not know (any more)."""
        for followed in forgotten:
            followed.told_len = 0
            followed.asked_len = _NEVER
        self._opens += forgotten
        self._send_news(())

    def _take(self, share: ScheduledSequence) -> Draft | None:
        limit = share.max_draft_tokens
        if limit == 0:
            return NO_DRAFT
        followed = self._followed.get(share.sequence.request_id)
        draft = followed.draft if followed is not None else None
        if draft is None:
            return None
        return Draft(draft.token_ids[:limit], draft.laws[:limit])


def _open(followed: _Followed) -> Open:
    sequence = followed.sequence
    return Open(
        request_id=sequence.request_id,
        token_ids=tuple(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        sampling=sequence.sampling,
        sample_index=sequence.request.sample_index,
        verify=sequence.verify,
        num_drafts=sequence.num_wanted_drafts if sequence.num_computed_tokens > 0 else 0,
    )


def _commit(followed: _Followed) -> Commit:
    sequence = followed.sequence
    new_ids = tuple(sequence.token_ids[followed.told_len :])
    return Commit(sequence.request_id, followed.told_len, new_ids, sequence.num_wanted_drafts)
