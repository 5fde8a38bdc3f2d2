"""Pairs are tried in the order of the index, or else in any order."""

import pickle
import random
from collections import Counter

import pytest

from protos.errors import UnavailableError
from protos.messages import GenerateRequest
from router.routing.index import IndexTimeoutError
from router.routing.routed_call import RoutedCall, RouteQuery, RouteReply
from router.routing.serve_router import RouteChooser

WORKERS = ("a", "b", "c", "d", "e")


class ScriptedIndex:
    """Replies with a fixed order, or fails."""

    def __init__(self, *order: str, error: Exception | None = None) -> None:
        self.order = order
        self.error = error
        self.queries: list[RouteQuery] = []
        self.withdrawn: list[tuple[str, str]] = []

    async def select(self, query: RouteQuery) -> RouteReply:
        self.queries.append(query)
        if self.error is not None:
            raise self.error
        return RouteReply(3, 5, 0.1, 0.2, 0.01, self.order, "", 7, 0)

    def withdraw(self, worker_id: str, request_id: str) -> None:
        self.withdrawn.append((worker_id, request_id))


def make_call() -> RoutedCall:
    return RoutedCall(GenerateRequest("r", (1, 2, 3), output_token_ids=(4,), session_id="s"), keys=b"k" * 16)


async def test_the_index_ranks_and_every_pair_stays_reachable():
    index = ScriptedIndex("c", "a", "b", "d", "e")
    call = make_call()
    ranks = await RouteChooser(index).choose(call, WORKERS)
    assert ranks[:3] == [["c"], ["a"], ["b"]]
    assert sorted(ranks[3]) == ["d", "e"]
    [query] = index.queries
    assert (query.num_tokens, query.keys, query.session_id, query.candidates) == (4, call.keys, "s", WORKERS)


async def test_pairs_that_the_index_left_out_come_last():
    ranks = await RouteChooser(ScriptedIndex("b")).choose(make_call(), WORKERS)
    assert ranks[0] == ["b"]
    assert sorted(ranks[1]) == ["a", "c", "d", "e"]


@pytest.mark.parametrize(
    ("error", "failure"),
    [(IndexTimeoutError("late"), "timeout"), (UnavailableError("gone"), "away"), (RuntimeError("a bug"), "error")],
)
async def test_all_pairs_are_offered_by_load_when_the_index_fails(error: Exception, failure: str):
    call = make_call()
    ranks = await RouteChooser(ScriptedIndex(error=error)).choose(call, WORKERS)
    assert [sorted(rank) for rank in ranks] == [sorted(WORKERS)]
    assert call.route is not None
    assert (call.route.failure, call.route.reply, call.withdraw) == (failure, None, None)


async def test_pairs_without_a_rank_are_shuffled():
    chooser = RouteChooser(ScriptedIndex(error=UnavailableError("gone")), random.Random(1))
    firsts = Counter([(await chooser.choose(make_call(), WORKERS))[0][0] for _ in range(500)])
    assert set(firsts) == set(WORKERS)
    assert min(firsts.values()) > 60


async def test_a_call_that_went_elsewhere_gives_its_reservation_back_and_is_not_audited():
    index = ScriptedIndex("c", "a")
    chooser, call = RouteChooser(index), make_call()
    await chooser.choose(call, WORKERS)
    chooser.routed(call, "a")
    assert index.withdrawn == [("c", "r")]
    assert call.route is not None
    assert (call.route.reply, call.route.failure) == (None, "diverted")


async def test_a_call_at_its_first_choice_keeps_its_reservation_until_refused():
    index = ScriptedIndex("c", "a")
    chooser, call = RouteChooser(index), make_call()
    await chooser.choose(call, WORKERS)
    chooser.routed(call, "c")
    assert index.withdrawn == []
    assert call.withdraw is not None
    call.withdraw()
    assert index.withdrawn == [("c", "r")]


async def test_a_second_query_carries_the_pair_that_refused():
    index = ScriptedIndex("c", "a")
    chooser, call = RouteChooser(index), make_call()
    await chooser.choose(call, WORKERS)
    await chooser.choose(call, WORKERS)
    assert [query.refused_by for query in index.queries] == [None, "c"]


async def test_only_the_request_is_sent_to_the_pair():
    call = make_call()
    await RouteChooser(ScriptedIndex("c")).choose(call, WORKERS)
    assert pickle.loads(pickle.dumps(call)) == call.request
