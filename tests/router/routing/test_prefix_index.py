from collections.abc import Callable

from hypothesis import example, given
from hypothesis import strategies as st

from protos.block_keys import BlockKey, CacheDelta, join_keys
from router.routing.prefix_index import PrefixIndex


def key(number: int) -> BlockKey:
    return number.to_bytes(16, "little")


def keys(*numbers: int) -> tuple[BlockKey, ...]:
    return tuple(key(number) for number in numbers)


def stored(*numbers: int) -> CacheDelta:
    return CacheDelta(stored=join_keys(keys(*numbers)))


def removed(*numbers: int) -> CacheDelta:
    return CacheDelta(removed=join_keys(keys(*numbers)))


def apply(index: PrefixIndex, worker_id: str, sequence: int, *deltas: CacheDelta, epoch: int = 0) -> None:
    index.apply(worker_id, epoch, sequence, deltas)


def test_matches_counts_leading_blocks_of_every_worker():
    index = PrefixIndex()
    apply(index, "a", 0, stored(1))
    apply(index, "b", 0, stored(1, 2, 3))
    apply(index, "c", 0, stored(1, 2))
    apply(index, "d", 0, stored(2, 3))
    assert index.matches(keys(1, 2, 3, 4)) == {"a": 1, "b": 3, "c": 2}
    assert index.matches(keys(9, 1)) == {}
    assert index.matches(()) == {}


def test_a_thousand_workers_are_told_apart():
    index = PrefixIndex()
    for number in range(1000):
        apply(index, f"w{number}", 0, stored(1, *([2] if number % 2 else [])))
    assert index.matches(keys(1, 2)) == {f"w{number}": 1 + number % 2 for number in range(1000)}


def test_removed_and_cleared_blocks_no_longer_match():
    index = PrefixIndex()
    apply(index, "a", 0, stored(1, 2, 3), removed(2))
    assert index.matches(keys(1, 2, 3)) == {"a": 1}
    apply(index, "a", 1, CacheDelta(is_cleared=True))
    assert index.matches(keys(1)) == {}
    assert len(index) == 0


def test_a_restarted_worker_loses_its_old_blocks_at_once():
    index = PrefixIndex()
    apply(index, "a", 0, stored(1, 2))
    index.reserve("a", keys(3), now_s=0.0, hold_s=10.0)
    apply(index, "a", 0, epoch=1)
    assert index.matches(keys(1)) == {}
    assert index.matches(keys(3)) == {}
    apply(index, "a", 1, stored(1), epoch=0)
    assert index.matches(keys(1)) == {}
    index.expire(100.0)
    index.check_integrity()


def test_a_gap_asks_for_a_snapshot_and_the_snapshot_replaces_everything():
    index = PrefixIndex()
    apply(index, "a", 0, stored(1, 2))
    apply(index, "a", 2, stored(5))
    assert index.is_in_doubt("a")
    assert index.needs_snapshot() == ["a"]
    index.resync("a", 0, 2, join_keys(keys(5, 6)))
    assert not index.is_in_doubt("a")
    assert index.matches(keys(1)) == {}
    assert index.matches(keys(5, 6)) == {"a": 2}
    apply(index, "a", 3, stored(7))
    assert not index.is_in_doubt("a")
    assert index.matches(keys(7)) == {"a": 1}
    index.check_integrity()


def test_a_snapshot_older_than_events_already_seen_changes_nothing():
    index = PrefixIndex()
    apply(index, "a", 0, stored(1))
    apply(index, "a", 5, stored(2))
    index.resync("a", 0, 3, join_keys(keys(9)))
    assert index.is_in_doubt("a")
    assert index.matches(keys(2)) == {"a": 1}


def test_a_worker_met_in_mid_sequence_needs_a_snapshot():
    index = PrefixIndex()
    apply(index, "a", 57, stored(1))
    assert index.is_in_doubt("a")


def test_a_repeated_batch_changes_nothing():
    index = PrefixIndex()
    apply(index, "a", 0, stored(1))
    apply(index, "a", 1, removed(1))
    apply(index, "a", 0, stored(1))
    assert index.matches(keys(1)) == {}


def test_pending_blocks_count_until_their_time_is_over():
    index = PrefixIndex()
    index.reserve("a", keys(1, 2), now_s=0.0, hold_s=2.0)
    assert index.matches(keys(1, 2)) == {"a": 2}
    index.expire(1.9)
    assert index.matches(keys(1, 2)) == {"a": 2}
    index.expire(2.0)
    assert index.matches(keys(1, 2)) == {}
    assert len(index) == 0


def test_a_confirmed_block_outlives_its_prediction():
    index = PrefixIndex()
    index.reserve("a", keys(1, 2), now_s=0.0, hold_s=2.0)
    apply(index, "a", 0, stored(1))
    index.expire(10.0)
    assert index.matches(keys(1, 2)) == {"a": 1}
    index.check_integrity()


def test_the_longer_of_two_predictions_holds():
    index = PrefixIndex()
    index.reserve("a", keys(1), now_s=0.0, hold_s=9.0)
    index.reserve("a", keys(2), now_s=0.0, hold_s=1.0)
    index.reserve("a", keys(2), now_s=0.5, hold_s=4.0)
    index.expire(2.0)
    assert index.matches(keys(2)) == {"a": 1}
    index.expire(4.5)
    assert index.matches(keys(2)) == {}
    assert index.matches(keys(1)) == {"a": 1}


def test_a_forgotten_worker_leaves_nothing_and_its_place_is_used_again():
    index = PrefixIndex()
    apply(index, "a", 0, stored(1))
    apply(index, "b", 0, stored(1))
    index.forget("a")
    apply(index, "c", 0, stored(2))
    assert index.matches(keys(1)) == {"b": 1}
    assert index.matches(keys(2)) == {"c": 1}
    index.check_integrity()


def test_memory_is_bounded_and_recently_routed_prefixes_stay():
    index = PrefixIndex(max_blocks_per_worker=64)
    apply(index, "a", 0, stored(1, 2))
    for sequence in range(1, 300):
        apply(index, "a", sequence, stored(1000 + sequence))
        index.reserve("a", keys(1, 2), now_s=float(sequence), hold_s=1.0)
        assert len(index._views["a"].held) <= 64
    assert index.matches(keys(1, 2)) == {"a": 2}
    assert index.matches(keys(1001)) == {}
    index.check_integrity()


class SlowIndex:
    """The same matches from one set per worker."""

    def __init__(self) -> None:
        self.held: dict[str, set[BlockKey]] = {worker_id: set() for worker_id in WORKERS}
        self.pending: dict[str, dict[BlockKey, float]] = {worker_id: {} for worker_id in WORKERS}

    def store(self, worker_id: str, stored_keys: tuple[BlockKey, ...]) -> None:
        self.held[worker_id].update(stored_keys)
        for k in stored_keys:
            self.pending[worker_id].pop(k, None)

    def matches(self, prompt: tuple[BlockKey, ...], now_s: float) -> dict[str, int]:
        depths = {}
        for worker_id in WORKERS:
            known = self.held[worker_id] | {k for k, lapses_s in self.pending[worker_id].items() if lapses_s > now_s}
            depth = next((place for place, k in enumerate(prompt) if k not in known), len(prompt))
            if depth:
                depths[worker_id] = depth
        return depths


class Histories:
    """Takes each action of a random history on an index and on a slow one; every action is a method."""

    def __init__(self) -> None:
        self.index, self.slow = PrefixIndex(), SlowIndex()
        self._sequences = dict.fromkeys(WORKERS, 0)
        self._epochs = dict.fromkeys(WORKERS, 0)
        self._reported: set[str] = set()

    def store(self, worker_id: str, numbers: list[int], now_s: float) -> None:
        self._apply(worker_id, stored(*numbers))
        self.slow.store(worker_id, keys(*numbers))

    def remove(self, worker_id: str, numbers: list[int], now_s: float) -> None:
        self._apply(worker_id, removed(*numbers))
        self.slow.held[worker_id].difference_update(keys(*numbers))

    def clear(self, worker_id: str, numbers: list[int], now_s: float) -> None:
        self._apply(worker_id, CacheDelta(is_cleared=True))
        self.slow.held[worker_id].clear()

    def restart(self, worker_id: str, numbers: list[int], now_s: float) -> None:
        """A first report ends no life before, so blocks reserved on a worker without one stay."""
        if worker_id in self._reported:
            self.slow.pending[worker_id].clear()
        self._epochs[worker_id] += 1
        self._sequences[worker_id] = 0
        self._apply(worker_id)
        self.slow.held[worker_id].clear()

    def forget(self, worker_id: str, numbers: list[int], now_s: float) -> None:
        self.index.forget(worker_id)
        self.slow.pending[worker_id].clear()
        self.restart(worker_id, numbers, now_s)

    def resync(self, worker_id: str, numbers: list[int], now_s: float) -> None:
        sequence = self._sequences[worker_id] - 1
        self.index.resync(worker_id, self._epochs[worker_id], sequence, join_keys(keys(*numbers)))
        self._reported.add(worker_id)
        self.slow.held[worker_id].clear()
        self.slow.store(worker_id, keys(*numbers))

    def reserve(self, worker_id: str, numbers: list[int], now_s: float) -> None:
        self.index.reserve(worker_id, keys(*numbers), now_s=now_s, hold_s=3.0)
        missing = [k for k in keys(*numbers) if k not in self.slow.held[worker_id]]
        self.slow.pending[worker_id].update(dict.fromkeys(missing, now_s + 3.0))

    def _apply(self, worker_id: str, *deltas: CacheDelta) -> None:
        apply(self.index, worker_id, self._sequences[worker_id], *deltas, epoch=self._epochs[worker_id])
        self._sequences[worker_id] += 1
        self._reported.add(worker_id)


WORKERS = ("a", "b", "c")
NUMBERS = st.lists(st.integers(0, 7), max_size=5, unique=True)
ACTIONS = (
    Histories.store,
    Histories.remove,
    Histories.clear,
    Histories.restart,
    Histories.reserve,
    Histories.resync,
    Histories.forget,
)
STEPS = st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from(WORKERS), NUMBERS), max_size=40)


@example(
    [
        (Histories.reserve, "a", [0, 1]),
        (Histories.store, "a", [0]),
        (Histories.restart, "a", []),
        (Histories.forget, "b", []),
    ],
    [0, 1],
)
@given(STEPS, NUMBERS)
def test_any_history_gives_the_matches_of_a_slow_index(
    steps: list[tuple[Callable[[Histories, str, list[int], float], None], str, list[int]]], prompt: list[int]
):
    histories = Histories()
    for now, (act, worker_id, numbers) in enumerate(steps):
        act(histories, worker_id, numbers, float(now))
        histories.index.expire(float(now))
        histories.index.check_integrity()
        assert histories.index.matches(keys(*prompt)) == histories.slow.matches(keys(*prompt), float(now))
