"""The channel's target side against a scripted draft: late, stale, lying, dead and reborn."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from actors.draft.channel_proposer import ChannelProposer
from actors.draft.draft_link import PROTOCOL_VERSION, Hello, Offers, Open, Round
from actors.process.frames import FrameConnection, FrameListener
from engine.batch.draft import NO_DRAFT, Draft, Offer
from engine.sequence.sequence import Sequence
from tests.engine.fixtures.builders import make_scheduled, make_sequence


class ScriptedDraft:
    """The other end of the socket, driven by hand."""

    def __init__(self, path: Path) -> None:
        self.listener = FrameListener(path)
        self.connection: FrameConnection | None = None

    def greet(self, version: int = PROTOCOL_VERSION, model: str = "draft-1") -> None:
        self.connection = self.listener.accept(Round, 20.0)
        assert self.connection is not None
        self.connection.send(Hello(version, model), 1.0)

    def rounds(self, timeout_s: float = 0.05) -> list[Round]:
        assert self.connection is not None
        return self.connection.receive(timeout_s)

    def offer(self, *offers: Offer, lost: tuple[str, ...] = (), drafting_s: float = 0.0) -> None:
        assert self.connection is not None
        self.connection.send(Offers(offers, lost, drafting_s), 1.0)

    def die(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.listener.close()


def _tokens_of(opening: Open) -> tuple[int, ...]:
    return opening.request.prompt_token_ids + opening.request.output_token_ids


@pytest.fixture
def sequence() -> Sequence:
    return make_sequence()


@pytest.fixture
def draft(folder: Path) -> Iterator[ScriptedDraft]:
    scripted = ScriptedDraft(folder / "draft.sock")
    yield scripted
    scripted.die()


@pytest.fixture
def channel(folder: Path, draft: ScriptedDraft) -> Iterator[ChannelProposer]:
    proposer = ChannelProposer(folder / "draft.sock")
    proposer.flush()
    draft.greet()
    proposer.flush()
    assert proposer.stats.is_connected
    yield proposer
    proposer._link._disconnect()


@pytest.fixture
def waits(channel: ChannelProposer, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the channel was ready to wait for the draft, one entry per wait."""
    receive = channel._link.receive
    waited: list[float] = []

    def watched(timeout_s: float) -> list[Offers]:
        if timeout_s > 0:
            waited.append(timeout_s)
        return receive(timeout_s)

    monkeypatch.setattr(channel._link, "receive", watched)
    return waited


def grow(channel: ChannelProposer, sequence: Sequence, *token_ids: int) -> None:
    sequence.num_computed_tokens = len(sequence.token_ids)
    sequence.token_ids.extend(token_ids)
    channel.commit([sequence])


def test_opening_tells_the_prompt_and_asks_for_nothing_yet(channel, draft, sequence):
    channel.open(sequence)
    channel.flush()
    (news,) = draft.rounds()
    (opening,) = news.opens
    assert (_tokens_of(opening), opening.num_drafts, opening.request.sampling.seed) == ((1, 2, 3), 4, 5)
    assert not opening.is_next


def test_a_sequence_is_announced_when_drafts_are_first_wanted(channel, draft, sequence, waits):
    sequence.draft_allowance = 0
    channel.open(sequence)
    channel.flush()
    assert draft.rounds() == []
    sequence.draft_allowance = 4
    grow(channel, sequence, 7)
    (news,) = draft.rounds()
    (opening,) = news.opens
    assert (_tokens_of(opening), opening.num_drafts, opening.is_next) == ((1, 2, 3, 7), 4, True)
    channel.propose([make_scheduled(sequence)])
    assert waits


def test_a_sequence_that_never_wanted_drafts_ends_without_a_message(channel, draft, sequence):
    sequence.draft_allowance = 0
    channel.open(sequence)
    channel.close(sequence.request_id)
    channel.flush()
    assert draft.rounds() == []
    assert not channel._opens, "it is forgotten"


def test_sequences_that_end_while_the_draft_is_away_are_forgotten(channel, draft):
    draft.die()
    for number in range(10):
        sequence = make_sequence(str(number))
        channel.open(sequence)
        channel.flush()
        channel.close(sequence.request_id)
    channel.flush()
    assert not channel._opens


def test_a_commit_carries_only_what_is_new_and_asks_for_drafts(channel, draft, sequence):
    channel.open(sequence)
    grow(channel, sequence, 7)
    draft.rounds()
    channel.flush()
    grow(channel, sequence, 8, 9)
    (news,) = draft.rounds()
    (commit,) = news.commits
    assert (commit.base_len, commit.token_ids, commit.num_drafts) == (4, (8, 9), 4)


def test_all_sequences_of_a_step_share_one_frame(channel, draft):
    sequences = [make_sequence(name) for name in "abcd"]
    for sequence in sequences:
        channel.open(sequence)
    channel.flush()
    for sequence in sequences:
        sequence.token_ids.append(9)
    channel.commit(sequences)
    opening, committing = draft.rounds()
    assert len(opening.opens) == len(committing.commits) == 4


def test_a_fresh_offer_is_proposed_and_cut_to_what_was_asked(channel, draft, sequence):
    channel.open(sequence)
    channel.flush()
    grow(channel, sequence, 7)
    draft.offer(Offer("a", 4, Draft((11, 12, 13, 14))))
    assert channel.propose([make_scheduled(sequence, 2)]) == [Draft((11, 12))]


def test_the_time_of_an_offer_is_split_between_drafting_and_channel(channel, draft, sequence):
    began_s = time.monotonic()
    channel.open(sequence)
    channel.flush()
    grow(channel, sequence, 7)
    time.sleep(0.02)
    draft.offer(Offer("a", 4, Draft((11,))), drafting_s=0.005)
    channel.propose([make_scheduled(sequence, 1)])
    assert channel.stats.drafting_s == 0.005
    assert 0.015 <= channel.stats.channel_s <= time.monotonic() - began_s


def test_a_stale_offer_is_dropped_and_counted(channel, draft, sequence):
    channel.open(sequence)
    channel.flush()
    grow(channel, sequence, 7)
    draft.offer(Offer("a", 3, Draft((11,))), Offer("a", 4, Draft((12,))), Offer("unknown", 4, Draft((13,))))
    assert channel.propose([make_scheduled(sequence)]) == [Draft((12,))]
    assert channel.stats.num_stale_offers == 2


def test_a_silent_draft_costs_one_wait_and_then_nothing(channel, draft, sequence, waits):
    channel.open(sequence)
    channel.flush()
    grow(channel, sequence, 7)
    assert channel.propose([make_scheduled(sequence)]) == [NO_DRAFT]
    assert channel.stats.num_missed_offers == 1
    assert waits
    waits.clear()
    for token_id in range(20):
        grow(channel, sequence, token_id)
        assert channel.propose([make_scheduled(sequence)]) == [NO_DRAFT]
    assert not waits


def test_silence_is_counted_while_the_draft_is_asked_and_ends_when_it_is_heard(channel, draft, sequence):
    channel.open(sequence)
    channel.flush()
    silences = []
    for token_id, idle_s in enumerate((0.0, 0.0, 500.0)):
        channel._missed_at_s = None if channel._missed_at_s is None else channel._missed_at_s - idle_s
        grow(channel, sequence, token_id)
        channel.propose([make_scheduled(sequence)])
        silences.append(channel.stats.silent_s)
    assert silences[0] == 0.0 < silences[1]
    assert silences[2] == silences[1] + 1.0  # a long pause counts as a second
    draft.offer(Offer("a", 4, Draft((11,))))
    channel.flush()
    assert channel.stats.silent_s == 0.0


def test_a_draft_that_stays_away_is_silent_too(channel, draft, sequence):
    channel.open(sequence)
    channel.flush()
    draft.die()
    for token_id in range(3):
        grow(channel, sequence, token_id)
        channel.propose([make_scheduled(sequence)])
    assert channel.stats.silent_s > 0.0


def test_a_draft_that_is_heard_again_is_waited_for_again(channel, draft, sequence):
    channel.open(sequence)
    channel.flush()
    grow(channel, sequence, 7)
    channel.propose([make_scheduled(sequence)])
    grow(channel, sequence, 8)
    draft.offer(Offer("a", 4, Draft((11,))))  # stale, but a sign of life
    draft.offer(Offer("a", 5, Draft((12,))))
    assert channel.propose([make_scheduled(sequence)]) == [Draft((12,))]


def test_a_draft_that_has_nothing_is_not_waited_for(channel, draft, sequence, waits):
    channel.open(sequence)
    channel.flush()
    grow(channel, sequence, 7)
    draft.offer(Offer("a", 4, NO_DRAFT))
    assert channel.propose([make_scheduled(sequence)]) == [NO_DRAFT]
    assert not waits


def test_death_is_noticed_at_once(channel, draft, sequence, waits):
    channel.open(sequence)
    channel.flush()
    grow(channel, sequence, 7)
    draft.die()
    assert channel.propose([make_scheduled(sequence)]) == [NO_DRAFT]
    assert not waits
    assert not channel.stats.is_connected


def test_a_new_draft_is_told_every_committed_token(channel, draft, folder, sequence):
    channel.open(sequence)
    channel.flush()
    draft.die()
    grow(channel, sequence, 7)
    grow(channel, sequence, 8, 9)
    reborn = ScriptedDraft(folder / "draft.sock")
    time.sleep(0.15)
    channel.flush()
    reborn.greet()
    channel.flush()
    (news,) = reborn.rounds()
    (opening,) = news.opens
    assert (opening.request.prompt_token_ids, opening.request.output_token_ids) == ((1, 2, 3), (7, 8, 9))
    assert opening.is_next
    reborn.offer(Offer("a", 6, Draft((20,))))
    assert channel.propose([make_scheduled(sequence)]) == [Draft((20,))]
    assert channel.stats.num_connections == 2
    reborn.die()


def test_another_model_is_news_and_the_same_one_is_none(channel, draft, folder):
    news: list[str] = []
    channel.on_new_draft = lambda: news.append("new")
    for model, number in (("draft-1", 0), ("draft-2", 1), ("draft-2", 1)):
        draft.die()
        channel.flush()
        draft = ScriptedDraft(folder / "draft.sock")
        time.sleep(0.15)
        channel.flush()
        draft.greet(model=model)
        channel.flush()
        assert len(news) == number
    draft.die()


def test_a_sequence_the_draft_lost_is_opened_again(channel, draft, sequence):
    channel.open(sequence)
    channel.flush()
    grow(channel, sequence, 7)
    draft.rounds()
    draft.offer(lost=("a", "unknown"))
    channel.flush()
    (news,) = draft.rounds()
    assert [_tokens_of(opening) for opening in news.opens] == [(1, 2, 3, 7)]


def test_a_closed_sequence_is_closed_at_the_draft(channel, draft, sequence):
    channel.open(sequence)
    channel.flush()
    draft.rounds()
    channel.close("a")
    channel.close("unknown")
    channel.flush()
    assert draft.rounds() == [Round(closes=("a",))]


def test_a_sequence_closed_before_it_was_sent_is_never_mentioned(channel, draft, sequence):
    channel.open(sequence)
    channel.close("a")
    channel.flush()
    assert draft.rounds() == []


def test_a_reused_id_is_closed_and_opened_in_one_round(channel, draft):
    channel.open(make_sequence("a", (1, 2)))
    channel.flush()
    draft.rounds()
    channel.close("a")
    channel.open(make_sequence("a", (8, 9)))
    channel.flush()
    (news,) = draft.rounds()
    assert news.closes == ("a",)
    assert [_tokens_of(opening) for opening in news.opens] == [(8, 9)]


def test_a_plain_sequence_costs_the_channel_nothing(channel, draft):
    plain = make_sequence(num_drafts=0)
    channel.open(plain)
    grow(channel, plain, 7)
    assert channel.propose([make_scheduled(plain, 0)]) == [NO_DRAFT]
    assert draft.rounds() == []


def test_a_draft_that_stops_reading_is_left_and_met_again(channel, draft, sequence):
    sequence.max_output_tokens = 10**6
    channel.open(sequence)
    channel.flush()
    began_s = time.monotonic()
    for _ in range(1000):  # fills the socket's buffer
        grow(channel, sequence, *range(200))
        if not channel.stats.is_connected:
            break
    assert not channel.stats.is_connected
    assert time.monotonic() - began_s < 30.0
    time.sleep(0.15)
    channel.flush()
    assert channel.propose([make_scheduled(sequence)]) == [NO_DRAFT]
    draft.greet()
    channel.flush()
    (news,) = draft.rounds()
    assert _tokens_of(news.opens[0]) == tuple(sequence.token_ids)


def test_another_protocol_is_refused(folder: Path, sequence):
    scripted = ScriptedDraft(folder / "draft.sock")
    channel = ChannelProposer(folder / "draft.sock")
    channel.flush()
    scripted.greet(version=PROTOCOL_VERSION + 1)
    channel.flush()
    assert not channel.stats.is_connected
    scripted.die()


def offer_ahead(draft: ScriptedDraft, *offers: Offer) -> None:
    assert draft.connection is not None
    draft.connection.send(Offers(offers, is_answer=False), 1.0)


def test_an_offer_made_ahead_is_there_without_a_wait(channel, draft, sequence, waits):
    channel.open(sequence)
    channel.flush()
    offer_ahead(draft, Offer("a", 3, Draft((11,)), (7,)), Offer("a", 3, Draft((12,)), (8,)))
    grow(channel, sequence, 8)
    draft.die()  # no draft could answer
    assert channel.propose([make_scheduled(sequence)]) == [Draft((12,))]
    assert not waits
    assert (channel.stats.num_lookups, channel.stats.num_hits, channel.stats.num_missed_offers) == (1, 1, 0)


def test_another_outcome_is_waited_for(channel, draft, sequence):
    channel.open(sequence)
    channel.flush()
    offer_ahead(draft, Offer("a", 3, Draft((11,)), (7,)))
    grow(channel, sequence, 8)
    draft.offer(Offer("a", 4, Draft((12,))))
    assert channel.propose([make_scheduled(sequence)]) == [Draft((12,))]
    assert (channel.stats.num_lookups, channel.stats.num_hits) == (1, 0)


def test_only_the_sequences_that_miss_are_waited_for(channel, draft):
    hit, miss = make_sequence("a"), make_sequence("b")
    for each in (hit, miss):
        channel.open(each)
    channel.flush()
    offer_ahead(draft, Offer("a", 3, Draft((11,)), (7,)), Offer("b", 3, Draft((12,)), (7,)))
    for each, token_id in ((hit, 7), (miss, 8)):
        each.num_computed_tokens = 3
        each.token_ids.append(token_id)
    channel.commit([hit, miss])
    draft.offer(Offer("b", 4, Draft((13,))))
    assert channel.propose([make_scheduled(hit), make_scheduled(miss)]) == [Draft((11,)), Draft((13,))]
    assert (channel.stats.num_lookups, channel.stats.num_hits) == (2, 1)


def test_offers_made_ahead_are_no_answer_times(channel, draft, sequence):
    """A frame that waited for the whole verification is no measure of answer times."""
    channel.open(sequence)
    channel.flush()
    offer_ahead(draft, Offer("a", 3, Draft((11,)), (7,)))
    time.sleep(0.05)
    grow(channel, sequence, 7)
    assert channel.stats.channel_s == 0.0


def test_an_offer_made_ahead_is_a_sign_of_life(channel, draft, sequence):
    channel.open(sequence)
    channel.flush()
    grow(channel, sequence, 7)
    channel.propose([make_scheduled(sequence)])  # missed: not waited for any more
    offer_ahead(draft, Offer("a", 4, Draft((11,)), (5,)))
    grow(channel, sequence, 8)
    draft.offer(Offer("a", 5, Draft((12,))))
    assert channel.propose([make_scheduled(sequence)]) == [Draft((12,))]


def test_outcomes_that_did_not_come_true_are_not_stale(channel, draft, sequence):
    channel.open(sequence)
    channel.flush()
    offer_ahead(draft, Offer("a", 3, Draft((11,)), (7,)), Offer("a", 3, Draft((12,)), (8,)))
    grow(channel, sequence, 8)
    assert channel.stats.num_stale_offers == 0
