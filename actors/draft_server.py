"""The draft process's end of the channel: mirrors the target's sequences and answers each round with offers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence as Seq

from actors.draft_messages import PROTOCOL_VERSION, Commit, Hello, Offer, Offers, Open, Round, ToDraft
from actors.frames import ConnectionLostError, FrameConnection, FrameListener
from engine.batch import ScheduledSequence
from engine.proposer import Proposer
from engine.sequence import Sequence
from protos.messages import GenerateRequest

logger = logging.getLogger(__name__)

_POLL_S = 0.5
_SEND_TIMEOUT_S = 5.0


class DraftServer:
    """Serves one target at a time with what `proposer` proposes; a target that leaves takes its sequences along."""

    def __init__(self, listener: FrameListener, proposer: Proposer, draft_version: str) -> None:
        self._listener = listener
        self._proposer = proposer
        self._draft_version = draft_version
        self._mirrors: dict[str, Sequence] = {}
        self._is_closing = threading.Event()

    def run(self) -> None:
        """Serve until `close`; raises what the proposer raises, which ends the process."""
        while not self._is_closing.is_set():
            connection = self._listener.accept(ToDraft, _POLL_S)
            if connection is not None:
                self._serve(connection)

    def close(self) -> None:
        """Make `run` return within half a second."""
        self._is_closing.set()

    def _serve(self, connection: FrameConnection[ToDraft]) -> None:
        try:
            connection.send(Hello(PROTOCOL_VERSION, self._draft_version), _SEND_TIMEOUT_S)
            while not self._is_closing.is_set():
                if rounds := _all_rounds(connection):
                    self._answer(connection, rounds)
        except ConnectionLostError as error:
            logger.info("target left: %s", error)
        finally:
            connection.close()
            self._forget(tuple(self._mirrors))

    def _answer(self, connection: FrameConnection[ToDraft], rounds: list[Round]) -> None:
        """Apply every round that has arrived, then offer once: older questions are stale by now.

        New prompts are read after that, since nobody waits for them yet.
        """
        asked, lost = self._apply(rounds)
        wanted = {each: number for each, number in asked.items() if number > 0}
        began_s = time.monotonic()
        offers = self._draft(wanted) if wanted else ()
        if offers or lost:
            connection.send(Offers(offers, lost, time.monotonic() - began_s), _SEND_TIMEOUT_S)
        self._read([each for each, number in asked.items() if number == 0])

    def _apply(self, rounds: list[Round]) -> tuple[dict[str, int], tuple[str, ...]]:
        """Returns how many drafts each live sequence is asked for, and those that are lost."""
        asked: dict[str, int] = {}
        lost: set[str] = set()
        for news in rounds:
            self._forget(news.closes)
            for opening in news.opens:
                self._open(opening)
                asked[opening.request_id] = opening.num_drafts
            for commit in news.commits:
                asked.pop(commit.request_id, None)
                if not self._follow(commit):
                    lost.add(commit.request_id)
                elif commit.num_drafts > 0:
                    asked[commit.request_id] = commit.num_drafts
        live = {each: number for each, number in asked.items() if each in self._mirrors}
        return live, tuple(lost - self._mirrors.keys())

    def _draft(self, asked: dict[str, int]) -> tuple[Offer, ...]:
        shares = [_share(self._mirrors[request_id], number) for request_id, number in asked.items()]
        drafts = self._proposer.propose(shares)
        return tuple(
            Offer(share.sequence.request_id, len(share.sequence.token_ids), draft)
            for share, draft in zip(shares, drafts, strict=True)
        )

    def _read(self, request_ids: Seq[str]) -> None:
        """Have the draft model compute these sequences' tokens, by way of one draft that nobody wants."""
        if request_ids:
            self._proposer.propose([_share(self._mirrors[request_id], 1) for request_id in request_ids])

    def _open(self, opening: Open) -> None:
        self._forget((opening.request_id,))
        self._mirrors[opening.request_id] = mirror = _mirror(opening)
        self._proposer.open(mirror)

    def _follow(self, commit: Commit) -> bool:
        """Append what is new; a repeated commit changes nothing, one with a gap means that the mirror is lost."""
        mirror = self._mirrors.get(commit.request_id)
        if mirror is None:
            return False
        num_known = len(mirror.token_ids) - commit.base_len
        if num_known < 0:
            self._forget((commit.request_id,))
            return False
        if new_ids := commit.token_ids[num_known:]:
            mirror.token_ids.extend(new_ids)
            self._proposer.commit((mirror,))
        return True

    def _forget(self, request_ids: Seq[str]) -> None:
        for request_id in request_ids:
            if self._mirrors.pop(request_id, None) is not None:
                self._proposer.close(request_id)


def _all_rounds(connection: FrameConnection[ToDraft]) -> list[Round]:
    rounds = connection.receive(_POLL_S)
    while rounds and (more := connection.receive(0.0)):
        rounds += more
    return rounds


def _mirror(opening: Open) -> Sequence:
    request = GenerateRequest(
        request_id=opening.request_id,
        prompt_token_ids=opening.token_ids[: opening.num_prompt_tokens],
        output_token_ids=opening.token_ids[opening.num_prompt_tokens :],
        sampling=opening.sampling,
        sample_index=opening.sample_index,
    )
    return Sequence(request, num_draft_tokens=opening.num_drafts, verify=opening.verify, arrival_s=0.0)


def _share(mirror: Sequence, num_drafts: int) -> ScheduledSequence:
    return ScheduledSequence(mirror, len(mirror.token_ids) - 1, 1, num_drafts)
