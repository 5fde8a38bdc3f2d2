"""A draft model in another process, seen by the engine as one more proposer.

Each commit is sent as soon as the target has committed, so the draft works while the target finishes its step and
plans the next. `propose` then waits for the offers up to a deadline and continues with the offers that have arrived. It
does not wait if the draft has already offered ahead for this outcome. The draft's discipline (on request or ahead)
shows in its offers alone. Nothing that the draft does, or fails to do, changes a token: the engine checks its offers
like any other proposal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

from actors.draft.draft_link import AdaptiveTimeout, Commit, DraftLink, Offers, Open, Round
from actors.shell_messages import DraftChannelStats
from engine.batch.draft import NO_DRAFT, Draft, Offer
from engine.sequence.batch import DraftQuery
from engine.sequence.sequence import RequestTokens

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


class SyncedSequence:
    """A sequence of the target's, the length that was sent to the draft process, and the draft's offers."""

    def __init__(self, sequence: RequestTokens) -> None:
        self.sequence = sequence
        self.offers = OfferTable(sequence.token_ids)
        self._sent_len = 0
        self._awaited_len: int | None = None

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
        output_ids = tuple(sequence.token_ids[sequence.num_prompt_tokens :])
        return Open(
            request=replace(sequence.request, output_token_ids=output_ids, prediction_token_ids=()),
            verify=sequence.verify,
            num_drafts=sequence.num_wanted_drafts,
            is_next=sequence.num_computed_tokens > 0,
            num_nodes=sequence.num_wanted_nodes,
            is_ahead=sequence.drafts_ahead,
        )

    def commit(self) -> Commit:
        """Return a message with the tokens committed since the last message."""
        sequence = self.sequence
        new_ids = tuple(sequence.token_ids[self._sent_len :])
        wanted = sequence.num_wanted_drafts, sequence.num_wanted_nodes, sequence.drafts_ahead
        return Commit(sequence.request_id, self._sent_len, new_ids, *wanted)

    def mark_sent(self) -> None:
        """Note that an `opening` or a `commit` was sent."""
        self._sent_len = len(self.sequence.token_ids)

    def mark_awaited(self) -> None:
        """Note that drafts of the commit just sent are awaited."""
        self._awaited_len = self._sent_len

    def forget(self) -> None:
        """Note that the draft process does not know the sequence (any more)."""
        self._sent_len = 0
        self._awaited_len = None


class ChannelProposer:
    """Implements `engine.proposer.Proposer` over the socket at `path`.

    It returns `NO_DRAFT` while the draft is away or late, or if no drafts were requested. Only the engine's thread may
    use it. `on_new_draft` is called when a process with another model connects; the owner may set it.
    """

    def __init__(self, path: Path) -> None:
        self._link = DraftLink(path)
        self._timeout = AdaptiveTimeout()
        self._sequences: dict[str, SyncedSequence] = {}
        self._closes: list[str] = []
        self._opens: list[SyncedSequence] = []
        self._asked_at_s = 0.0
        self._generation = 0
        self._draft_version = ""
        self.on_new_draft: Callable[[], None] = lambda: None
        self._missed_at_s: float | None = None
        self._stats = DraftChannelStats()

    @property
    def stats(self) -> DraftChannelStats:
        """Counts since the start; may be read from any thread."""
        return replace(self._stats, is_connected=self._link.is_connected, num_connections=self._generation)

    def flush(self) -> None:
        """Send pending opens and closes, and accept the greeting of a draft process that is back."""
        self._receive(0.0)
        self._send_news(())

    def open(self, sequence: RequestTokens) -> None:
        """Announce the sequence to the draft with the next `flush`, or when drafts are first wanted."""
        if sequence.num_draft_tokens == 0:
            return
        synced = SyncedSequence(sequence)
        self._sequences[sequence.request_id] = synced
        self._opens.append(synced)

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        """Wait for the requested offers, and return the drafts that have arrived."""
        self.flush()
        wanting = [query for query in queries if query.max_draft_tokens > 0]
        if wanting and not self._link.is_connected:
            self._missed()  # a draft that hangs stops taking frames, and its connection is dropped
        self._await_offers(wanting)
        return [self._take(query) for query in queries]

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        """Send the committed tokens to the draft."""
        self._receive(0.0)
        known = [self._sequences[each.request_id] for each in sequences if each.request_id in self._sequences]
        self._look_up(known)
        unopened = [each for each in known if not each.is_opened]
        self._send_news([each for each in known if each.is_opened and each.has_news])
        for each in unopened:
            if each.is_opened:
                each.mark_awaited()

    def close(self, request_id: str) -> None:
        """Remove the sequence; the draft forgets it with the next `flush`."""
        synced = self._sequences.pop(request_id, None)
        if synced is not None and synced.is_opened:
            self._closes.append(request_id)

    def _look_up(self, grown: Seq[SyncedSequence]) -> None:
        """Count the sequences whose drafts were offered ahead."""
        wanting = [each for each in grown if each.sequence.num_wanted_drafts > 0]
        self._stats.num_lookups += len(wanting)
        self._stats.num_hits += sum(each.draft is not None for each in wanting)

    def _send_news(self, grown: Seq[SyncedSequence]) -> None:
        # Forget sequences that have ended, also while nothing can be sent.
        self._opens = [each for each in self._opens if self._sequences.get(each.sequence.request_id) is each]
        # While drafts do not pay, the draft process reads no prompt.
        opens = [each for each in self._opens if each.sequence.num_wanted_drafts > 0]
        if not (self._closes or opens or grown):
            return
        news = Round(
            tuple(self._closes), tuple(each.opening() for each in opens), tuple(each.commit() for each in grown)
        )
        if not self._link.send(news):
            return  # the next draft process gets everything
        self._closes = []
        self._opens = [each for each in self._opens if each.sequence.num_wanted_drafts == 0]
        self._asked_at_s = time.monotonic()
        for each in (*opens, *grown):
            each.mark_sent()
        for each in grown:
            each.mark_awaited()

    def _await_offers(self, queries: Seq[DraftQuery]) -> None:
        synced = [self._sequences[each] for query in queries if (each := query.sequence.request_id) in self._sequences]
        deadline_s = time.monotonic() + self._timeout.allowed_s
        while num_missing := sum(each.is_awaited for each in synced):
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0 or not self._link.is_connected:
                self._stats.num_missed_offers += num_missing
                self._missed()
                return
            self._receive(remaining_s)

    def _missed(self) -> None:
        """Count a pass without drafts: at most a second since the last such pass is silence, the rest is idle time."""
        now_s = time.monotonic()
        if self._missed_at_s is not None:
            # A longer pass does not count as silence of the draft.
            self._stats.silent_s += min(now_s - self._missed_at_s, 1.0)
        self._missed_at_s = now_s
        self._timeout.missed()

    def _receive(self, timeout_s: float) -> None:
        for message in self._link.receive(timeout_s):
            self._stats.silent_s, self._missed_at_s = 0.0, None
            self._stats.drafting_s += message.drafting_s
            self._stats.translated += message.translated
            if message.is_answer:
                latency_s = time.monotonic() - self._asked_at_s
                self._timeout.answered(latency_s)
                self._stats.channel_s += max(0.0, latency_s - message.drafting_s)
            else:
                self._timeout.heard()
            self._keep(message)
        if self._generation != self._link.generation:
            self._generation = self._link.generation
            self._stats.silent_s, self._missed_at_s = 0.0, None
            self._note_version(self._link.draft_version)
            self._start_over()

    def _note_version(self, version: str) -> None:
        before, self._draft_version = self._draft_version, version
        if before not in ("", version):
            self.on_new_draft()

    def _keep(self, message: Offers) -> None:
        for offer in message.offers:
            synced = self._sequences.get(offer.request_id)
            is_kept = synced is not None and synced.offers.add(offer)
            # Only one of the offers made ahead can come true; the others are no loss.
            self._stats.num_stale_offers += not is_kept and not offer.after
        self._replay([self._sequences[each] for each in message.lost if each in self._sequences])

    def _start_over(self) -> None:
        """Resend every sequence to a new draft process, which knows no sequence."""
        self._closes = []
        self._opens = []
        self._timeout = AdaptiveTimeout()
        self._replay(list(self._sequences.values()))

    def _replay(self, forgotten: list[SyncedSequence]) -> None:
        """Send all committed tokens of sequences that the draft does not know (any more)."""
        for each in forgotten:
            each.forget()
        self._opens += forgotten
        self._send_news(())

    def _take(self, query: DraftQuery) -> Draft:
        synced = self._sequences.get(query.sequence.request_id)
        draft = synced.draft if synced is not None else None
        if draft is None or draft.parents:
            return draft or NO_DRAFT  # the engine shortens a tree to its limit
        return draft.head(query.max_draft_tokens)
