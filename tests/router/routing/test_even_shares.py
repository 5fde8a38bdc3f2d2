"""Pairs that hold the same prefix share its requests, whatever small differences their measured rates have."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import example, given, settings
from hypothesis import strategies as st

from protos.block_keys import CacheDelta, WorkerLoad, join_keys
from router.config import RouterConfig
from router.routing.index import IndexState
from router.routing.routed_call import RouteQuery

BLOCK = 16
PREFIX = tuple(number.to_bytes(16, "little") for number in range(20))
REPORT_S = 0.2


@dataclass(frozen=True, slots=True)
class PairRates:
    """The rates that a pair has measured; 0 where none yet."""

    prefill_tokens_per_s: float = 1000.0
    decode_tokens_per_s: float = 40.0


def shares(
    pairs: Sequence[PairRates], num_at_once: int, num_requests: int = 64, holders: Sequence[int] | None = None
) -> list[int]:
    """Send requests of one hot prefix in a closed loop, and return how many each pair got.

    A pair needs half a second for an answer, and a tenth more for each concurrent one. The index hears of
    loads five times a second.
    """
    names = [f"pair-{number}" for number in range(len(pairs))]
    state = IndexState(RouterConfig(block_size=BLOCK))
    for number in holders if holders is not None else range(len(pairs)):
        state.index.apply(names[number], 0, 0, (CacheDelta(stored=join_keys(PREFIX)),))
    running: Counter[str] = Counter()
    got: Counter[str] = Counter()
    ends: list[tuple[float, str]] = []
    now_s, reported_s = 0.0, -REPORT_S
    for number in range(num_requests):
        if len(ends) == num_at_once:
            now_s, name = heapq.heappop(ends)
            running[name] -= 1
        if now_s >= reported_s + REPORT_S:
            reported_s = now_s
            for name, pair in zip(names, pairs, strict=True):
                context = running[name] * 300
                rates = pair.prefill_tokens_per_s, 1e-5, pair.decode_tokens_per_s
                state.loads.update(WorkerLoad(name, 0, now_s, 0, running[name], 0, context, *rates))
        query = RouteQuery(str(number), len(PREFIX) * BLOCK + 9, join_keys(PREFIX), "", tuple(names))
        chosen = state.choose(query, now_s).worker_id
        got[chosen] += 1
        running[chosen] += 1
        heapq.heappush(ends, (now_s + 0.5 + 0.1 * running[chosen] + 1e-6 * number, chosen))
        now_s += 0.001
    return [got[name] for name in names]


MEASURED = st.builds(
    PairRates,
    prefill_tokens_per_s=st.floats(700.0, 1500.0),
    decode_tokens_per_s=st.sampled_from([0.0, 20.0, 40.0, 60.0]),
)


@example([PairRates(), PairRates()], 16)
@example([PairRates(decode_tokens_per_s=60.0), PairRates(decode_tokens_per_s=20.0)], 16)
@example([PairRates(decode_tokens_per_s=40.0), PairRates(decode_tokens_per_s=0.0)], 16)
@example([PairRates(700.0), PairRates(1500.0)], 16)
@given(st.lists(MEASURED, min_size=1, max_size=8), st.integers(2, 48))
@settings(max_examples=60, deadline=None)
def test_pairs_that_hold_a_hot_prefix_share_its_requests(pairs: list[PairRates], num_at_once: int) -> None:
    num_at_once = max(num_at_once, 2 * len(pairs))
    got = shares(pairs, num_at_once)
    assert max(got) - min(got) <= 64 / len(pairs) / 2, got


@example(2, 0.0)
@given(st.integers(1, 8), st.sampled_from([0.0, 40.0]))
@settings(max_examples=16, deadline=None)
def test_equal_pairs_share_requests_that_come_one_at_a_time(num_pairs: int, measured: float) -> None:
    pairs = [PairRates(decode_tokens_per_s=measured), *[PairRates()] * (num_pairs - 1)]
    got = shares(pairs, 1, num_requests=64 * num_pairs)
    assert min(got) >= 32, got


@example([PairRates(), PairRates(), PairRates()], 3)
@given(st.lists(MEASURED, min_size=2, max_size=8), st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_a_prefix_that_one_pair_holds_is_not_left(pairs: list[PairRates], num_at_once: int) -> None:
    got = shares(pairs, num_at_once, num_requests=24, holders=[1])
    assert got[1] == 24, got
