"""The draft process's end of the channel: mirrors the target's sequences and replies to each round with offers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import takewhile
from typing import TYPE_CHECKING

from actors.draft.channel_proposer import OfferTable
from actors.draft.draft_link import PROTOCOL_VERSION, Commit, Hello, Offers, Open, Round
from actors.process.frames import POLL_S, SEND_TIMEOUT_S, FrameConnection, FrameListener
from engine.accounting.engine_stats import TranslationCounts
from engine.batch.draft import NO_DRAFT, Draft, Offer
from engine.proposer import Proposer
from engine.sequence.batch import UnscheduledQuery
from engine.sequence.sequence import DraftRule, RequestTokens
from protos.frames import ConnectionLostError

if TYPE_CHECKING:  # it loads the models' code, which takes seconds and a class of the operator's does not need
    from engine.proposer.draft_model.ahead_drafter import AheadDrafter, PendingPass

logger = logging.getLogger(__name__)


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
        """Drop the work for a pass whose verdict has come."""
        self._due.pop(request_id, None)

    def offered(self, sequence: RequestTokens) -> Draft | None:
        """Return the draft that was offered ahead for the committed tokens, if any."""
        return self._tables[sequence.request_id].draft

    def expect(self, sequence: RequestTokens, draft: Draft, num_drafts: int) -> None:
        """Prepare for the target's next pass, which verifies `draft`; the pass after it may have `num_drafts`.

        Of a tree, outcomes after its first branch are prepared.
        """
        from engine.proposer.draft_model.ahead_drafter import PendingPass  # as above

        # The target computes nothing from an impossible token on.
        draft_ids = tuple(takewhile(lambda token_id: token_id >= 0, draft.first_path().token_ids))
        self._due[sequence.request_id] = PendingPass(sequence, draft_ids, num_drafts)

    def run(self, send: Callable[[tuple[Offer, ...]], None], is_stopped: Callable[[], bool]) -> None:
        """Draft for all expected passes and send the offers; return at once when `is_stopped`."""

        def emit(offers: tuple[Offer, ...]) -> None:
            if kept := tuple(offer for offer in offers if self._tables[offer.request_id].add(offer)):
                send(kept)

        if self._drafter.run(tuple(self._due.values()), emit, is_stopped):
            self._due.clear()


class DraftServer:
    """Serves one target at a time with `proposer`'s drafts. When a target disconnects, its sequences are dropped.

    With an `ahead_drafter` it also offers ahead of verdicts, until the target sends something.
    """

    def __init__(
        self,
        listener: FrameListener,
        proposer: Proposer,
        draft_version: str,
        ahead_drafter: AheadDrafter | None = None,
        counts: Callable[[], TranslationCounts] = TranslationCounts,
    ) -> None:
        """`counts` returns the translation counts so far of a draft with its own tokenizer."""
        self._listener = listener
        self._proposer = proposer
        self._draft_version = draft_version
        self._ahead = None if ahead_drafter is None else DraftAhead(ahead_drafter)
        self._counts = counts
        self._reported_counts = counts()
        self._sequences: dict[str, RequestTokens] = {}
        self._is_closing = threading.Event()

    def run(self) -> None:
        """Serve until `close`. An error of the proposer passes through and ends the process."""
        while not self._is_closing.is_set():
            connection = self._listener.accept(Round, POLL_S)
            if connection is not None:
                self._serve(connection)

    def close(self) -> None:
        """Make `run` return within half a second."""
        self._is_closing.set()

    def _serve(self, connection: FrameConnection[Round]) -> None:
        try:
            connection.send(Hello(PROTOCOL_VERSION, self._draft_version), SEND_TIMEOUT_S)
            while not self._is_closing.is_set():
                if rounds := _all_rounds(connection):
                    self._answer(connection, rounds)
                if self._ahead is not None and self._ahead.has_work:
                    self._look_ahead(connection, self._ahead)
        except ConnectionLostError as error:
            logger.info("target left: %s", error)
        finally:
            connection.close()
            self._forget(tuple(self._sequences))

    def _answer(self, connection: FrameConnection[Round], rounds: list[Round]) -> None:
        """Apply all rounds that have arrived, then offer once: older requests are stale by now.

        New prompts are prefilled last, since no pass waits for them yet.
        """
        drafts, prompts, lost = self._apply(rounds)
        wanted = {
            each: number
            for each, number in drafts.items()
            if self._ahead is None or self._ahead.offered(self._sequences[each]) is None
        }
        began_s = time.monotonic()
        offers = self._draft(wanted) if wanted else ()
        if offers or lost:
            drafting_s = time.monotonic() - began_s
            connection.send(Offers(offers, lost, drafting_s, translated=self._new_counts()), SEND_TIMEOUT_S)
        if self._ahead is not None:
            self._expect(self._ahead, drafts, prompts, {offer.request_id: offer.draft for offer in offers})
        self._prefill(tuple(each for each in prompts if not self._is_ahead(each)))

    def _look_ahead(self, connection: FrameConnection[Round], ahead: DraftAhead) -> None:
        """Offer for possible outcomes until all are done, or the next round has arrived."""
        began_s = time.monotonic()

        def send(offers: tuple[Offer, ...]) -> None:
            nonlocal began_s
            now_s = time.monotonic()
            ahead_of_verdict = Offers(offers, (), now_s - began_s, is_answer=False, translated=self._new_counts())
            connection.send(ahead_of_verdict, SEND_TIMEOUT_S)
            began_s = now_s

        ahead.run(send, connection.has_arrived)

    def _new_counts(self) -> TranslationCounts:
        counts = self._counts()
        new, self._reported_counts = counts - self._reported_counts, counts
        return new

    def _expect(
        self, ahead: DraftAhead, drafts: dict[str, int], prompts: dict[str, int], answered: dict[str, Draft]
    ) -> None:
        """Expect passes that verify the drafts just offered, the drafts offered ahead, or no draft after a prompt."""
        for request_id, number in drafts.items():
            sequence = self._sequences[request_id]
            if self._is_ahead(request_id):
                ahead.expect(sequence, answered.get(request_id) or ahead.offered(sequence) or NO_DRAFT, number)
        for request_id, number in prompts.items():
            if self._is_ahead(request_id):
                ahead.expect(self._sequences[request_id], NO_DRAFT, number)

    def _is_ahead(self, request_id: str) -> bool:
        return self._ahead is not None and self._sequences[request_id].drafts_ahead

    def _apply(self, rounds: list[Round]) -> tuple[dict[str, int], dict[str, int], tuple[str, ...]]:
        """Apply the rounds in order.

        Return the numbers of drafts that they request by sequence, for the next pass and for the pass after a prompt,
        and the sequences that they continue and this process does not know.
        """
        drafts: dict[str, int] = {}
        prompts: dict[str, int] = {}
        lost: set[str] = set()
        for news in rounds:
            self._forget(news.closes)
            for opening in news.opens:
                self._open(opening)
                (drafts if opening.is_next else prompts)[opening.request.request_id] = opening.num_drafts
            for commit in news.commits:
                drafts[commit.request_id] = commit.num_drafts
                prompts.pop(commit.request_id, None)
                if not self._sync(commit):
                    lost.add(commit.request_id)
        return self._live(drafts), self._live(prompts), tuple(lost - self._sequences.keys())

    def _live(self, requested: dict[str, int]) -> dict[str, int]:
        """Leave out sequences that have ended, or want no draft."""
        return {each: number for each, number in requested.items() if number > 0 and each in self._sequences}

    def _draft(self, requested: dict[str, int]) -> tuple[Offer, ...]:
        queries = [self._query(self._sequences[each], number) for each, number in requested.items()]
        drafts = self._proposer.propose(queries)
        return tuple(
            Offer(query.sequence.request_id, len(query.sequence.token_ids), draft)
            for query, draft in zip(queries, drafts, strict=True)
        )

    def _prefill(self, request_ids: Seq[str]) -> None:
        """Prefill these sequences in the draft model by proposing one draft that is thrown away."""
        if request_ids:
            self._proposer.propose([UnscheduledQuery(self._sequences[request_id], 1) for request_id in request_ids])

    def _query(self, sequence: RequestTokens, num_drafts: int) -> UnscheduledQuery:
        """Return the query of a draft that was not made ahead.

        Drafts made ahead are chains. What was prepared in time must not change the shape of drafts that are drawn: then
        the text of a seed would depend on it.
        """
        is_chain = self._ahead is not None and not sequence.is_matched
        return UnscheduledQuery(sequence, num_drafts, 0 if is_chain else sequence.node_allowance)

    def _open(self, opening: Open) -> None:
        sequence = _sequence(opening)
        self._forget((sequence.request_id,))
        self._sequences[sequence.request_id] = sequence
        self._proposer.open(sequence)
        if self._ahead is not None:
            self._ahead.open(sequence)

    def _sync(self, commit: Commit) -> bool:
        """Append new tokens, and return True. A repeated commit changes nothing; after a gap the sequence is lost."""
        sequence = self._sequences.get(commit.request_id)
        if sequence is None:
            return False
        sequence.node_allowance, sequence.drafts_ahead = commit.num_nodes, commit.is_ahead
        num_known = len(sequence.token_ids) - commit.base_len
        if num_known < 0:
            self._forget((commit.request_id,))
            return False
        if new_ids := commit.token_ids[num_known:]:
            sequence.append(new_ids)
            self._proposer.commit((sequence,))
            if self._ahead is not None:
                self._ahead.decided(commit.request_id)
        return True

    def _forget(self, request_ids: Seq[str]) -> None:
        for request_id in request_ids:
            if self._sequences.pop(request_id, None) is not None:
                self._proposer.close(request_id)
                if self._ahead is not None:
                    self._ahead.close(request_id)


def _all_rounds(connection: FrameConnection[Round]) -> list[Round]:
    rounds = connection.receive(POLL_S)
    while rounds and (more := connection.receive(0.0)):
        rounds += more
    return rounds


def _sequence(opening: Open) -> RequestTokens:
    rule = DraftRule(opening.num_drafts, opening.verify, num_tree_nodes=opening.num_nodes)
    sequence = RequestTokens(opening.request, rule)
    sequence.drafts_ahead = opening.is_ahead
    return sequence
