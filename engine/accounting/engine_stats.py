"""The engine's counters, for metrics, the router's load signal and benchmarks."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import astuple, dataclass, field
from enum import StrEnum
from operator import add

from engine.accounting.drift import DriftStats
from engine.accounting.goodput import GoodputStats
from engine.accounting.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class TranslationCounts:
    """The number of drafted tokens, and of lost tokens.

    A token is lost if the target has no token for it, or if its text cannot follow the committed text.
    """

    num_tokens: int = 0
    num_lost: int = 0

    def __add__(self, other: TranslationCounts) -> TranslationCounts:
        return TranslationCounts(self.num_tokens + other.num_tokens, self.num_lost + other.num_lost)

    def __sub__(self, other: TranslationCounts) -> TranslationCounts:
        return TranslationCounts(self.num_tokens - other.num_tokens, self.num_lost - other.num_lost)


class FetchFailure(StrEnum):
    """The cause of a failed fetch; the engine then computes the missing tokens itself."""

    LOST = "lost"  # the replica or an object is gone
    TIMEOUT = "timeout"
    MISMATCH = "mismatch"  # another model, dtype, block size or layout
    REFUSED = "refused"  # the replica cannot compute it: too long for its pool, or the pool is full
    GARBLED = "garbled"  # blocks are out of order, of the wrong size, or missing


WAIT_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True, slots=True)
class HistogramStats:
    """Counts per bucket, not cumulative. The last count is for values above all bounds."""

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0

    @property
    def cumulative(self) -> list[tuple[str, float]]:
        """Cumulative counts: `(le, count)` of every bucket."""
        sums, so_far = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            sums.append((bound, float(so_far)))
        return sums


class Histogram:
    """Counts `HistogramStats`."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one value. A value equal to a bound belongs to its bucket."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def snapshot(self) -> HistogramStats:
        """Return the counts so far."""
        return HistogramStats(self._bounds, tuple(self._counts), self._total)


@dataclass(frozen=True, slots=True)
class DraftStats:
    """Sums of all speculation since the engine started. Passes of plain decoding do not count.

    `num_accepted_tokens_per_pos[i]` is the number of passes that accepted more than i drafts, so the conditional
    acceptance at a position is the ratio of neighbours. In a tree, every node is a draft token and a position is a
    depth.
    """

    num_drafts: int = 0  # passes with at least one draft token
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    num_invalid_tokens: int = 0  # proposed ids outside the vocabulary or over the limit, dropped before the pass
    num_passes_by_shape: dict[str, int] = field(default_factory=dict)  # of sequences: see `CheckedDraft.shape`

    @property
    def acceptance_length(self) -> float:
        """Mean tokens per pass with drafts, including the recovered or bonus token; 1 if no pass had drafts."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


@dataclass(frozen=True, slots=True)
class ClassStats:
    """Sums of one class of passes, by draft method and by how the requests are sampled.

    `num_drafted[i]` passes had a draft at position i, and `num_accepted[i]` accepted it.
    """

    method: str
    name: str  # greedy or sampled, free or structured
    num_drafted: tuple[int, ...]
    num_accepted: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReasoningStats:
    """Reasoning steps that drafts wrote (`engine.approximate`), counted apart from exact acceptance."""

    num_accepted: int = 0
    num_rejected: int = 0
    num_abandoned: int = 0  # started and not scored: the draft stopped at once, or the pass had no room
    num_accepted_tokens: int = 0
    num_rejected_tokens: int = 0
    total_score: float = 0.0  # sum over all scored steps

    @classmethod
    def of_verdict(cls, num_tokens: int, score: float, *, is_accepted: bool) -> ReasoningStats:
        """Return the counts of one scored step."""
        if is_accepted:
            return cls(num_accepted=1, num_accepted_tokens=num_tokens, total_score=score)
        return cls(num_rejected=1, num_rejected_tokens=num_tokens, total_score=score)

    def __add__(self, other: ReasoningStats) -> ReasoningStats:
        return ReasoningStats(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class PositionLogStats:
    """Sums of the log of verified positions (`engine.position_log`). A full disk stops the log for good."""

    num_positions: int = 0  # written to files, including files removed since
    num_dropped: int = 0  # not logged, since the writer was too slow
    num_bytes: int = 0
    is_stopped: bool = False


@dataclass(frozen=True, slots=True)
class RemotePrefillStats:
    """Sums since the engine started."""

    num_tokens: int = 0  # tokens whose KV was fetched
    num_fetches: int = 0
    num_fetching: int = 0  # sequences that wait for blocks now
    failures: dict[str, int] = field(default_factory=dict)  # by cause
    fetch_s: float = 0.0  # from the order to the last block
    transfer_s: float = 0.0  # the part of it spent on transfers


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of an engine. Sums run since the engine started.

    `engine.accounting.rates.RateMeter` measures the three rates; they are 0 until measured.
    """

    num_running: int
    num_waiting: int
    num_queued_prefill_tokens: int  # accepted, not cached and not yet computed
    num_running_decode_tokens: int  # context of the sequences that decode
    num_blocks: int
    num_used_blocks: int  # held by sequences; cached blocks without a holder are free
    num_prefix_queried_tokens: int
    num_prefix_hit_tokens: int
    num_preemptions: int
    drafts: DraftStats
    times: StepTimes
    prefill_tokens_per_s: float = 0.0  # with nothing decoding
    decode_slowdown: float = 0.0  # extra seconds per second of prefill, per context token in decode
    decode_tokens_per_s: float = 0.0  # committed tokens per second of one running sequence
    speedups: dict[str, float] = field(default_factory=dict)  # by class of requests (`SpeculationGate`)
    remote: RemotePrefillStats = field(default_factory=RemotePrefillStats)
    reasoning: ReasoningStats = ReasoningStats()
    log: PositionLogStats = PositionLogStats()
    classes: tuple[ClassStats, ...] = ()
    drift: tuple[DriftStats, ...] = ()
    queue_times: HistogramStats = HistogramStats()  # seconds from a request's arrival to its first blocks
    prefill_times: HistogramStats = HistogramStats()  # seconds from there to its first tokens, without transfers
    goodput: tuple[GoodputStats, ...] = ()
    num_non_finite_requests: int = 0  # requests that ended because their logits were not finite
    num_overlapped_passes: int = 0  # passes issued ahead (`engine.scheduler.async_scheduling`)

    @property
    def kv_usage(self) -> float:
        """Share of the pool that sequences hold, 0 to 1."""
        return self.num_used_blocks / self.num_blocks
