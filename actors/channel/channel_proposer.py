"""A draft model in another process, seen by the engine as one more proposer.

A commit leaves the moment the target has committed, so the draft works while the target finishes its step and plans
the next; `propose` then waits for the offers up to a deadline and goes on with what is there. A draft that has offered
ahead of the verdict, for this very outcome, is not waited for: which discipline it follows, and for which sequences it
had time, shows in what it has offered. Nothing the draft does, or fails to do, changes a token; what it sends is
checked by the engine like any other proposal.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path

from actors.channel.adaptive_timeout import AdaptiveTimeout
from actors.channel.draft_link import DraftLink
from actors.channel.draft_messages import Offers, Round
from actors.channel.synced_sequence import SyncedSequence
from actors.shell_messages import DraftChannelStats
from engine.draft import NO_DRAFT, Draft
from engine.sequence.draft_query import DraftQuery
from engine.sequence.request_tokens import RequestTokens

_LONGEST_PASS_S = 1.0  # that counts as silence of the draft


class ChannelProposer:
    """Implements `engine.proposer.Proposer` over the socket at `path`.

    It has `NO_DRAFT` while the draft is away or late, or was not asked. For the engine's thread alone. `on_new_draft`
    is called where a process greets with another model than the one before; its owner may set it.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._link = DraftLink(path, clock)
        self._clock = clock
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
        """Send what `open` and `close` have left to say, and meet a draft process that has come back."""
        self._receive(0.0)
        self._send_news(())

    def open(self, sequence: RequestTokens) -> None:
        """Tell the draft of the sequence with the next `flush`."""
        if sequence.num_draft_tokens == 0:
            return
        synced = SyncedSequence(sequence)
        self._sequences[sequence.request_id] = synced
        self._opens.append(synced)

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        """Wait for the offers that were asked for, and return what is there."""
        self.flush()
        wanting = [query for query in queries if query.max_draft_tokens > 0]
        if wanting and not self._link.is_connected:
            self._missed()  # one that hangs stops taking frames, and is left
        self._await_offers(wanting)
        return [self._take(query) for query in queries]

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        """Tell the draft what was committed."""
        self._receive(0.0)
        known = [self._sequences[each.request_id] for each in sequences if each.request_id in self._sequences]
        self._look_up(known)
        self._send_news([each for each in known if each.is_told and each.has_news])

    def close(self, request_id: str) -> None:
        """Have the draft forget the sequence with the next `flush`."""
        synced = self._sequences.pop(request_id, None)
        if synced is not None and synced.is_told:
            self._closes.append(request_id)

    def disconnect(self) -> None:
        """Leave the draft process for good."""
        self._link.close()

    def _look_up(self, grown: Seq[SyncedSequence]) -> None:
        """Count the sequences whose next pass has its drafts prepared."""
        wanting = [each for each in grown if each.sequence.num_wanted_drafts > 0]
        self._stats.num_lookups += len(wanting)
        self._stats.num_hits += sum(each.draft is not None for each in wanting)

    def _send_news(self, grown: Seq[SyncedSequence]) -> None:
        opens = [each for each in self._opens if self._sequences.get(each.sequence.request_id) is each]
        if not (self._closes or opens or grown):
            return
        news = Round(
            tuple(self._closes), tuple(each.opening() for each in opens), tuple(each.commit() for each in grown)
        )
        if not self._link.send(news):
            return  # the next draft process is told everything
        self._closes = []
        self._opens = []
        self._asked_at_s = self._clock()
        for each in (*opens, *grown):
            each.was_told()
        for each in grown:
            each.was_asked()

    def _await_offers(self, queries: Seq[DraftQuery]) -> None:
        synced = [self._sequences[each] for query in queries if (each := query.sequence.request_id) in self._sequences]
        deadline_s = self._clock() + self._timeout.allowed_s
        while num_missing := sum(each.is_awaited for each in synced):
            remaining_s = deadline_s - self._clock()
            if remaining_s <= 0 or not self._link.is_connected:
                self._stats.num_missed_offers += num_missing
                self._missed()
                return
            self._receive(remaining_s)

    def _missed(self) -> None:
        """A pass goes without drafts. Between two such passes the draft was asked for a second at most, else idle."""
        now_s = self._clock()
        if self._missed_at_s is not None:
            self._stats.silent_s += min(now_s - self._missed_at_s, _LONGEST_PASS_S)
        self._missed_at_s = now_s
        self._timeout.missed()

    def _receive(self, timeout_s: float) -> None:
        for message in self._link.receive(timeout_s):
            self._stats.silent_s, self._missed_at_s = 0.0, None
            self._stats.drafting_s += message.drafting_s
            self._stats.translated += message.translated
            if message.is_answer:
                latency_s = self._clock() - self._asked_at_s
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
            # Of the offers made ahead only one can come true: the others are no loss.
            self._stats.num_stale_offers += not is_kept and not offer.after
        self._replay([self._sequences[each] for each in message.lost if each in self._sequences])

    def _start_over(self) -> None:
        """A new draft process has greeted, and knows nothing."""
        self._closes = []
        self._opens = []
        self._timeout = AdaptiveTimeout()
        self._replay(list(self._sequences.values()))

    def _replay(self, forgotten: list[SyncedSequence]) -> None:
        """Tell the draft all that is committed of sequences it does not know (any more)."""
        for each in forgotten:
            each.forget()
        self._opens += forgotten
        self._send_news(())

    def _take(self, query: DraftQuery) -> Draft:
        synced = self._sequences.get(query.sequence.request_id)
        draft = synced.draft if synced is not None else None
        if draft is None or draft.parents:
            return draft or NO_DRAFT  # the engine cuts a tree to its room
        return draft.head(query.max_draft_tokens)
