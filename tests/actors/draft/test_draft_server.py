"""The channel's draft side: sequences grow with commits, whatever is repeated, missing or out of order."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import structs

from actors.draft.draft_link import PROTOCOL_VERSION, Commit, DraftMessage, Hello, Offers, Open, Round
from actors.draft.draft_server import DraftServer
from actors.process.frames import FrameConnection, FrameListener, connect
from engine.batch.draft import Draft, Offer
from engine.proposer.draft_model.ahead_drafter import PendingPass
from protos.messages import GenerateRequest, VerifyMode

PATIENCE_S = 20.0  # of these tests, on a busy machine
FOREVER = 100_000  # steps of a millisecond: what waits for their end is not answered within our patience


class CountingProposer:
    """Drafts the numbers after the last token, and records its calls."""

    def __init__(self) -> None:
        self.open_ids: set[str] = set()
        self.read: list[tuple[str, tuple[int, ...]]] = []
        self.num_nodes: list[int] = []

    def open(self, sequence) -> None:
        self.open_ids.add(sequence.request_id)

    def propose(self, batch) -> list[Draft]:
        self.read += [(scheduled.sequence.request_id, tuple(scheduled.sequence.token_ids)) for scheduled in batch]
        self.num_nodes += [scheduled.max_tree_nodes for scheduled in batch]
        return [
            Draft(tuple(scheduled.sequence.token_ids[-1] + 1 + i for i in range(scheduled.max_draft_tokens)))
            for scheduled in batch
        ]

    def commit(self, sequences) -> None:
        pass

    def close(self, request_id: str) -> None:
        self.open_ids.discard(request_id)


@pytest.fixture
def proposer() -> CountingProposer:
    return CountingProposer()


@pytest.fixture
def target(folder: Path, proposer: CountingProposer) -> Iterator[FrameConnection]:
    server = DraftServer(FrameListener(folder / "draft.sock"), proposer, "draft-1")
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    connection = connect(folder / "draft.sock", DraftMessage)
    assert connection is not None
    assert connection.receive(PATIENCE_S) == [Hello(PROTOCOL_VERSION, "draft-1")]
    yield connection
    connection.close()
    server.close()
    thread.join(PATIENCE_S)


def opening(
    request_id: str = "a", token_ids: tuple[int, ...] = (1, 2), num_drafts: int = 2, is_next: bool = False
) -> Open:
    request = GenerateRequest(request_id, token_ids[:2], output_token_ids=token_ids[2:])
    return Open(request, VerifyMode.COUPLED, num_drafts, is_next)


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def ask(target: FrameConnection, *rounds: Round) -> Offers:
    for news in rounds:
        target.send(news, 1.0)
    (answer,) = target.receive(PATIENCE_S)
    return answer


def drafts_of(answer: Offers) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {offer.request_id: (offer.base_len, offer.draft.token_ids) for offer in answer.offers}


def test_a_commit_is_answered_with_an_offer_on_top_of_it(target):
    target.send(Round(opens=(opening(),)), 1.0)
    answer = ask(target, Round(commits=(Commit("a", 2, (7, 8), 3),)))
    assert drafts_of(answer) == {"a": (4, (9, 10, 11))}


def test_an_opening_alone_is_read_and_not_answered(target, proposer):
    target.send(Round(opens=(opening(),)), 1.0)
    until(lambda: bool(proposer.read))
    assert proposer.read == [("a", (1, 2))]
    assert target.receive(0.1) == []


def test_a_replayed_opening_is_answered_where_drafts_are_wanted(target):
    answer = ask(target, Round(opens=(opening(token_ids=(1, 2, 5), is_next=True),)))
    assert drafts_of(answer) == {"a": (3, (6, 7))}


def test_all_sequences_are_answered_in_one_frame(target):
    target.send(Round(opens=(opening("a"), opening("b"))), 1.0)
    answer = ask(target, Round(commits=(Commit("a", 2, (7,), 1), Commit("b", 2, (9,), 1))))
    assert drafts_of(answer) == {"a": (3, (8,)), "b": (3, (10,))}


def test_a_repeated_commit_changes_nothing(target):
    target.send(Round(opens=(opening(),)), 1.0)
    commit = Commit("a", 2, (7, 8), 1)
    ask(target, Round(commits=(commit,)))
    assert drafts_of(ask(target, Round(commits=(commit,)))) == {"a": (4, (9,))}


def test_an_unknown_sequence_and_one_with_a_gap_are_reported_lost(target, proposer):
    target.send(Round(opens=(opening(),)), 1.0)
    answer = ask(target, Round(commits=(Commit("a", 5, (7,), 1), Commit("b", 2, (7,), 1))))
    assert sorted(answer.lost) == ["a", "b"]
    assert answer.offers == ()
    assert proposer.open_ids == set()


def test_a_closed_sequence_is_forgotten(target, proposer):
    target.send(Round(opens=(opening(),)), 1.0)
    assert ask(target, Round(closes=("a", "unknown"), commits=(Commit("a", 2, (7,), 1),))).lost == ("a",)
    assert proposer.open_ids == set()


def test_a_target_that_leaves_takes_its_sequences_along(folder, target, proposer):
    target.send(Round(opens=(opening(),)), 1.0)
    until(lambda: bool(proposer.open_ids))
    target.close()
    successor = connect(folder / "draft.sock", DraftMessage)
    assert successor is not None
    assert successor.receive(PATIENCE_S) == [Hello(PROTOCOL_VERSION, "draft-1")]
    assert proposer.open_ids == set()
    successor.close()


# ---- ahead of the verdict -----------------------------------------------------------------------------------------


class VerifyingTarget:
    """The target's end of the socket, which hears one frame at a time, however many arrive together."""

    def __init__(self, connection: FrameConnection) -> None:
        self._connection = connection
        self._heard: list[Offers] = []

    def send(self, news: Round, timeout_s: float) -> None:
        self._connection.send(news, timeout_s)

    def hear(self) -> Offers:
        self._heard = self._heard or self._connection.receive(PATIENCE_S)
        return self._heard.pop(0)


class CountingAheadDrafter:
    """Predicts that all drafts are accepted and the next number follows; takes `num_steps` steps of a millisecond."""

    def __init__(self) -> None:
        self.num_steps = 1
        self.seen: list[PendingPass] = []
        self.num_stopped = 0

    def run(self, pending, emit, is_stopped) -> bool:
        self.seen += pending
        for _ in range(self.num_steps):
            if is_stopped():
                self.num_stopped += 1
                return False
            time.sleep(0.001)
        emit(tuple(_prepared(each) for each in pending))
        return True


def _prepared(pending: PendingPass) -> Offer:
    last = (*pending.sequence.token_ids, *pending.draft_ids)[-1]
    after = (*pending.draft_ids, last + 1)
    draft = Draft(tuple(last + 2 + index for index in range(pending.num_drafts)))
    return Offer(pending.sequence.request_id, len(pending.sequence.token_ids), draft, after)


@pytest.fixture
def ahead_drafter() -> CountingAheadDrafter:
    return CountingAheadDrafter()


@pytest.fixture
def async_target(
    folder: Path, proposer: CountingProposer, ahead_drafter: CountingAheadDrafter
) -> Iterator[VerifyingTarget]:
    server = DraftServer(FrameListener(folder / "draft.sock"), proposer, "draft-1", ahead_drafter)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    connection = connect(folder / "draft.sock", DraftMessage)
    assert connection is not None
    connection.receive(PATIENCE_S)
    yield VerifyingTarget(connection)
    connection.close()
    server.close()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def outcomes_of(answer: Offers) -> dict[tuple[int, ...], tuple[int, ...]]:
    assert not answer.is_answer
    return {offer.after: offer.draft.token_ids for offer in answer.offers}


def test_the_first_token_after_a_prompt_is_drafted_for_ahead(async_target):
    async_target.send(Round(opens=(opening(),)), 1.0)
    assert outcomes_of(async_target.hear()) == {(3,): (4, 5)}


def test_an_outcome_that_was_offered_ahead_is_not_answered_but_looked_beyond(async_target, proposer):
    async_target.send(Round(opens=(opening(),)), 1.0)
    async_target.hear()
    async_target.send(Round(commits=(Commit("a", 2, (3,), 2),)), 1.0)
    assert outcomes_of(async_target.hear()) == {(4, 5, 6): (7, 8)}
    async_target.send(Round(commits=(Commit("a", 3, (4, 5, 6), 2),)), 1.0)
    assert outcomes_of(async_target.hear()) == {(7, 8, 9): (10, 11)}
    assert proposer.read == []


@pytest.mark.parametrize(("verify", "num_nodes"), [(VerifyMode.COUPLED, 5), (VerifyMode.REJECTION, 0)])
def test_where_drafts_are_made_ahead_only_matched_sequences_have_trees(
    async_target, proposer: CountingProposer, verify: VerifyMode, num_nodes: int
):
    begun = Open(GenerateRequest("a", (1, 2)), verify, 2, True, num_nodes=5)
    async_target.send(Round(opens=(begun,)), 1.0)
    assert async_target.hear().is_answer
    assert proposer.num_nodes == [num_nodes]


def test_the_size_of_a_tree_comes_with_each_commit(target: FrameConnection, proposer: CountingProposer):
    ask(target, Round(opens=(structs.replace(opening(is_next=True), num_nodes=5),)))
    ask(target, Round(commits=(Commit("a", 2, (3,), 2, 7),)))
    ask(target, Round(commits=(Commit("a", 3, (4,), 2),)))
    assert proposer.num_nodes == [5, 7, 0]


def test_any_other_outcome_is_answered_first(async_target):
    async_target.send(Round(opens=(opening(),)), 1.0)
    async_target.hear()
    async_target.send(Round(commits=(Commit("a", 2, (9,), 2),)), 1.0)
    answer = async_target.hear()
    assert answer.is_answer
    assert drafts_of(answer) == {"a": (3, (10, 11))}
    assert outcomes_of(async_target.hear()) == {(10, 11, 12): (13, 14)}


def test_a_verdict_ends_what_was_prepared_for_it_at_once(async_target, ahead_drafter):
    ahead_drafter.num_steps = FOREVER
    async_target.send(Round(opens=(opening(),)), 1.0)
    until(lambda: bool(ahead_drafter.seen))
    async_target.send(Round(commits=(Commit("a", 2, (3,), 2),)), 1.0)
    assert drafts_of(async_target.hear()) == {"a": (3, (4, 5))}  # nothing had been offered yet
    ahead_drafter.num_steps = 1
    async_target.send(Round(closes=("unknown",)), 1.0)  # any news ends it, and it begins again
    assert outcomes_of(async_target.hear()) == {(4, 5, 6): (7, 8)}
    assert ahead_drafter.num_stopped == 2


def test_a_sequence_that_wants_no_more_is_not_drafted_ahead_for(async_target, ahead_drafter):
    async_target.send(Round(opens=(opening(),)), 1.0)
    async_target.hear()
    async_target.send(Round(commits=(Commit("a", 2, (3,), 0),)), 1.0)
    async_target.send(Round(opens=(opening("b"),)), 1.0)
    assert [offer.request_id for offer in async_target.hear().offers] == ["b"]


def test_each_commit_says_whether_to_draft_ahead(async_target, ahead_drafter, proposer):
    async_target.send(Round(opens=(opening(),)), 1.0)
    assert outcomes_of(async_target.hear()) == {(3,): (4, 5)}
    async_target.send(Round(commits=(Commit("a", 2, (9,), 2, is_ahead=False),)), 1.0)
    assert drafts_of(async_target.hear()) == {"a": (3, (10, 11))}
    async_target.send(Round(opens=(structs.replace(opening("b"), is_ahead=False),)), 1.0)
    until(lambda: ("b", (1, 2)) in proposer.read)  # the prompt is read, as without drafts ahead
    assert len(ahead_drafter.seen) == 1
    async_target.send(Round(commits=(Commit("a", 3, (10,), 2),)), 1.0)
    assert async_target.hear().is_answer
    assert outcomes_of(async_target.hear()) == {(11, 12, 13): (14, 15)}


def test_a_closed_sequence_is_not_drafted_ahead_for(async_target, ahead_drafter):
    ahead_drafter.num_steps = FOREVER
    async_target.send(Round(opens=(opening("a"), opening("b"))), 1.0)
    until(lambda: bool(ahead_drafter.seen))
    ahead_drafter.num_steps = 1
    async_target.send(Round(closes=("a",)), 1.0)
    assert [offer.request_id for offer in async_target.hear().offers] == ["b"]


def test_a_sequence_opened_again_has_been_offered_nothing(async_target):
    async_target.send(Round(opens=(opening(),)), 1.0)
    async_target.hear()
    async_target.send(Round(opens=(opening(token_ids=(1, 2, 3), is_next=True),)), 1.0)
    assert drafts_of(async_target.hear()) == {"a": (3, (4, 5))}
