"""A pair's Prometheus metrics, read from the engine's counters; the ingress measures latencies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from actors.shell_messages import DraftChannelStats, Pong
from engine.accounting.engine_stats import FetchFailure, HistogramStats
from protos.served_model import CanaryOutcome, DraftReport

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class PairMetrics(Collector):
    """The pair's `outrider_*` metrics; sums start over when the target restarts, as Prometheus expects.

    Args:
        replica: a label of every sample, which keeps each replica's series separate; no label if None.
    """

    def __init__(self, replica: str | None = None) -> None:
        self._replica = replica
        self._pong: Pong | None = None
        self._num_refused = 0
        self._drafts: Sequence[DraftReport] = ()

    def update(self, pong: Pong, num_refused: int, drafts: Sequence[DraftReport] = ()) -> None:
        """Take in the target's present numbers, and the running drafts that can be replaced."""
        self._pong = pong
        self._num_refused = num_refused
        self._drafts = drafts

    def text(self) -> str:
        """Return all metrics in Prometheus text format."""
        return generate_latest(self).decode()

    def collect(self) -> Iterable[Family]:
        """Yield every metric."""
        for family in self._families():
            if self._replica is not None:
                own = {"replica": self._replica}
                family.samples = [each._replace(labels={**each.labels, **own}) for each in family.samples]
            yield family

    def _families(self) -> Iterable[Family]:
        if self._pong is None:
            return
        yield from _speculation(self._pong)
        yield from _channels(self._pong)
        yield from _classes(self._pong)
        yield from _drift(self._pong)
        yield from _reasoning(self._pong)
        yield from _log(self._pong)
        yield from _cache(self._pong)
        yield from _requests(self._pong)
        yield _counter("num_requests_refused", "Requests refused because the pair was full.", self._num_refused)
        yield from _served_drafts(self._drafts)


def _speculation(pong: Pong) -> Iterable[Family]:
    drafts = pong.engine.drafts
    yield _counter("spec_decode_num_drafts", "Verification passes with at least one draft token.", drafts.num_drafts)
    yield _counter("spec_decode_num_draft_tokens", "Draft tokens verified.", drafts.num_draft_tokens)
    yield _counter("spec_decode_num_accepted_tokens", "Draft tokens accepted.", drafts.num_accepted_tokens)
    yield _counters(
        "spec_decode_num_accepted_tokens_per_pos",
        "Passes whose draft at this position was accepted.",
        "position",
        {str(position): number for position, number in enumerate(drafts.num_accepted_tokens_per_pos)},
    )
    yield _counters(
        "spec_decode_passes",
        "Passes of sequences by shape of draft: none, chain, block (a chain of one pass), tree, ahead of a verdict.",
        "shape",
        drafts.num_passes_by_shape,
    )
    yield _gauge(
        "spec_decode_acceptance_length",
        "Mean tokens per pass with drafts, the recovered or bonus token included.",
        drafts.acceptance_length,
    )
    yield _gauges(
        "spec_decode_speedup",
        "Tokens per second over recent steps, divided by the estimate for the same steps without the class's drafts.",
        "class",
        pong.engine.speedups,
    )
    yield _counter("spec_decode_num_invalid_tokens", "Draft tokens that were not valid.", drafts.num_invalid_tokens)


def _channels(pong: Pong) -> Iterable[Family]:
    """Yield the metrics of each draft model, by its method."""
    counters: tuple[tuple[str, str, Callable[[DraftChannelStats], float]], ...] = (
        ("num_stale_offers", "Offers that arrived too late.", lambda stats: stats.num_stale_offers),
        ("num_missed_offers", "Drafts missing at the deadline.", lambda stats: stats.num_missed_offers),
        ("cache_queries", "Passes that wanted drafts.", lambda stats: stats.num_lookups),
        ("cache_hits", "Passes whose drafts had been offered ahead.", lambda stats: stats.num_hits),
        ("num_connections", "Draft processes that have connected.", lambda stats: stats.num_connections),
        ("drafting_seconds", "Time the draft model worked on offers.", lambda stats: stats.drafting_s),
        ("channel_seconds", "Time offers took beyond drafting.", lambda stats: stats.channel_s),
        (
            "foreign_tokens",
            "Tokens drafted by a draft with its own tokenizer.",
            lambda stats: stats.translated.num_tokens,
        ),
        (
            "untranslated_tokens",
            "Foreign tokens without a translation to the target's tokens.",
            lambda stats: stats.translated.num_lost,
        ),
    )
    for name, text, value_of in counters:
        values = {method: value_of(stats) for method, stats in pong.drafts.items()}
        yield _counters(f"draft_{name}", text, "method", values)
    connected = {method: stats.is_connected for method, stats in pong.drafts.items()}
    yield _gauges("draft_connected", "1 while the process of a draft model is connected.", "method", connected)


def _classes(pong: Pong) -> Iterable[Family]:
    """Yield acceptance by position, method and class of requests: the ratio of the two families."""
    labels = ["method", "class", "position"]
    drafted = CounterMetricFamily("outrider_spec_decode_class_draft_tokens_per_pos", "Drafts verified.", labels=labels)
    accepted = CounterMetricFamily(
        "outrider_spec_decode_class_accepted_tokens_per_pos", "Drafts accepted.", labels=labels
    )
    for stats in pong.engine.classes:
        for position, counts in enumerate(zip(stats.num_drafted, stats.num_accepted, strict=True)):
            for family, count in zip((drafted, accepted), counts, strict=True):
                family.add_metric([stats.method, stats.name, str(position)], count)
    yield drafted
    yield accepted


def _drift(pong: Pong) -> Iterable[Family]:
    """Yield the recent and usual acceptance at the first position, and alarms, by class."""
    classes = pong.engine.drift
    for name, text, values in (
        ("recent_acceptance", "Acceptance at position 0 over the last steps.", [each.recent for each in classes]),
        ("usual_acceptance", "Acceptance at position 0 as it was before.", [each.reference for each in classes]),
        ("drift_alarm", "1 while acceptance is far below the usual.", [each.is_alarming for each in classes]),
    ):
        names = (each.name for each in classes)
        yield _gauges(f"spec_decode_{name}", text, "class", dict(zip(names, values, strict=True)))
    num_alarms = {each.name: each.num_alarms for each in classes}
    yield _counters("spec_decode_drift_alarms", "Alarms so far, by class of requests.", "class", num_alarms)


def _served_drafts(drafts: Sequence[DraftReport]) -> Iterable[Family]:
    """Yield the running drafts and their canaries: the outcome so far, and the measured gain."""
    info = GaugeMetricFamily(
        "outrider_draft_info", "1 for a running draft model.", labels=["method", "draft", "digest"]
    )
    state = GaugeMetricFamily(
        "outrider_draft_canary",
        "1 for the state of the latest canary, a draft tried in turns with the old one.",
        labels=["method", "outcome"],
    )
    gain = GaugeMetricFamily(
        "outrider_draft_canary_gain",
        "Goodput of the canary divided by the old draft's goodput, minus 1, and its bounds.",
        labels=["method", "bound"],
    )
    for draft in drafts:
        method, canary = draft.method, draft.canary
        info.add_metric([method, PurePath(draft.path).name, draft.digest], 1)
        for outcome in CanaryOutcome:
            state.add_metric([method, outcome], canary is not None and canary.outcome is outcome)
        for bound in ("gain", "low", "high"):
            if canary is not None and (value := getattr(canary, bound)) is not None:
                gain.add_metric([method, bound], value)
    yield from (info, state, gain)
    num_pairs = {each.method: 0 if each.canary is None else each.canary.num_pairs for each in drafts}
    yield _gauges("draft_canary_pairs", "Pairs of blocks measured by the latest canary.", "method", num_pairs)


def _reasoning(pong: Pong) -> Iterable[Family]:
    """Yield the metrics of approximate reasoning steps, which no other family counts."""
    stats = pong.engine.reasoning
    ends = {"accepted": stats.num_accepted, "rejected": stats.num_rejected, "abandoned": stats.num_abandoned}
    yield _counters("reasoning_steps", "Reasoning steps that the draft began, by outcome.", "outcome", ends)
    num_tokens = {"accepted": stats.num_accepted_tokens, "rejected": stats.num_rejected_tokens}
    yield _counters("reasoning_step_tokens", "Tokens of scored reasoning steps, by verdict.", "outcome", num_tokens)
    yield _counter("reasoning_step_score", "Sum of the scores of reasoning steps, 0 to 9 each.", stats.total_score)


def _log(pong: Pong) -> Iterable[Family]:
    """Yield the metrics of the log that drafts are tuned on."""
    log = pong.engine.log
    yield _counter("tune_log_positions", "Verified positions written to the log.", log.num_positions)
    yield _counter("tune_log_dropped", "Passes of requests left out because the writer was late.", log.num_dropped)
    yield _counter("tune_log_bytes", "Bytes written to the log, including bytes removed since.", log.num_bytes)
    yield _gauge("tune_log_stopped", "1 when the log has stopped because the disk is full.", log.is_stopped)


def _cache(pong: Pong) -> Iterable[Family]:
    engine = pong.engine
    yield _gauge("kv_cache_usage", "Share of the KV blocks that sequences hold, 0 to 1.", engine.kv_usage)
    yield _gauge("kv_cache_blocks", "KV blocks of the pool.", engine.num_blocks)
    yield _gauge("kv_cache_used_blocks", "KV blocks that sequences hold.", engine.num_used_blocks)
    remote = engine.remote
    queried, hits = engine.num_prefix_queried_tokens, engine.num_prefix_hit_tokens
    yield _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", queried)
    yield _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", hits)
    yield _counter("prefill_local_tokens", "Prompt tokens this pair computed.", queried - hits - remote.num_tokens)
    yield _counter("prefill_remote_tokens", "Prompt tokens a prefill replica computed.", remote.num_tokens)
    yield _counter("prefill_transfers", "Prompts sent to a prefill replica.", remote.num_fetches)
    failures = {str(cause): remote.failures.get(cause, 0) for cause in FetchFailure}
    yield _counters("prefill_transfers_failed", "Transfers that ended in local prefill, by cause.", "cause", failures)
    yield _counter("prefill_transfer_seconds", "Time KV blocks were under way.", remote.transfer_s)
    yield _counter("prefill_remote_seconds", "Time from orders to their last blocks.", remote.fetch_s)
    yield _gauge("prefill_num_requests_fetching", "Sequences that wait for KV blocks.", remote.num_fetching)


def _requests(pong: Pong) -> Iterable[Family]:
    yield _gauge("num_requests_running", "Sequences that hold blocks.", pong.engine.num_running)
    yield _gauge("num_requests_waiting", "Sequences in the queue.", pong.engine.num_waiting)
    yield _counter(
        "num_preemptions", "Sequences sent back to the queue for lack of blocks.", pong.engine.num_preemptions
    )
    yield _counter(
        "num_non_finite_requests",
        "Sequences that ended with an error because their logits were not finite.",
        pong.engine.num_non_finite_requests,
    )
    yield _histogram(
        "request_queue_time_seconds",
        "From a sequence's arrival at the engine to its first blocks.",
        pong.engine.queue_times,
    )
    yield _histogram(
        "request_prefill_time_seconds",
        "From a sequence's first blocks to its first tokens, without the wait for blocks of prefill replicas.",
        pong.engine.prefill_times,
    )
    times = pong.engine.times
    parts = ("receive", "schedule", "draft", "forward", "sample", "commit")
    seconds = {part: getattr(times, f"{part}_s") for part in parts}
    yield _counters("step_seconds", "Time of the engine's steps, by part.", "part", seconds)
    yield _counter("num_steps", "Steps of the engine.", times.num_steps)
    yield _counter(
        "num_overlapped_passes",
        "Passes that began before the host had the tokens of the pass before.",
        pong.engine.num_overlapped_passes,
    )


def _counters(name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    """Return a counter with one sample per entry of `values`, whose keys are the values of its label."""
    family = CounterMetricFamily(f"outrider_{name}", text, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family


def _gauges(name: str, text: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    """Return a gauge, as `_counters` does a counter."""
    family = GaugeMetricFamily(f"outrider_{name}", text, labels=[label])
    for each, value in values.items():
        family.add_metric([each], value)
    return family


def _histogram(name: str, text: str, stats: HistogramStats) -> HistogramMetricFamily:
    return HistogramMetricFamily(f"outrider_{name}", text, buckets=stats.cumulative, sum_value=stats.total)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"outrider_{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"outrider_{name}", text, value=value)
