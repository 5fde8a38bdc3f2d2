"""The figures of a running deployment, from two readings of its `/metrics`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from prometheus_client.parser import text_string_to_metric_families

Reading = Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]
Growth = Callable[..., dict[tuple[str, ...], float]]  # of a counter by its name, and by the values of some labels


@dataclass(frozen=True, slots=True)
class PairFigures:
    """One pair: sequences, used share of its KV cache, accepted drafts per pass with drafts, its draft's state.

    `tokens_per_pass` is None if no pass between the readings had drafts.
    """

    replica: str
    num_running: int
    num_waiting: int
    kv_usage: float
    tokens_per_pass: float | None
    is_draft_away: bool
    shapes: str = ""  # the shares of passes, as in "chain 80%, none 20%"


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """One method and class: accepted shares per position since the previous reading, None without drafts."""

    name: str
    acceptance: tuple[float | None, ...]
    is_alarmed: bool


@dataclass(frozen=True, slots=True)
class Figures:
    """The whole deployment between two readings."""

    output_tokens_per_s: float
    prompt_tokens_per_s: float
    speedups: dict[str, float]
    pairs: tuple[PairFigures, ...]
    classes: tuple[ClassFigures, ...]
    alarms: tuple[str, ...]


def read_metrics(text: str) -> Reading:
    """Return the values of an exposition by name and labels.

    Raises:
        ValueError: the text is not an exposition.
    """
    values: dict[str, dict[tuple[tuple[str, str], ...], float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removesuffix("_total")  # the parser adds it to counters
            values[name][tuple(sorted(sample.labels.items()))] = float(sample.value)
    return values


def figures_between(before: Reading, now: Reading, seconds: float) -> Figures:
    """Return the figures between two readings; a counter that was reset counts from 0."""
    growth = partial(_growth, before, now)
    speedups = _by(now, "outrider_spec_decode_speedup", "class")
    classes = _classes(growth, now)
    pairs = _pairs(growth, now)
    return Figures(
        output_tokens_per_s=sum(growth("outrider_generation_tokens", "ingress").values()) / seconds,
        prompt_tokens_per_s=sum(growth("outrider_prompt_tokens", "ingress").values()) / seconds,
        speedups={name: sum(values) / len(values) for name, values in speedups.items()},
        pairs=pairs,
        classes=classes,
        alarms=_alarms(now, pairs, classes),
    )


def drafts_between(before: Reading, now: Reading) -> tuple[float, float]:
    """Return the numbers of verified and of accepted draft tokens."""
    growth = partial(_growth, before, now)
    drafted = growth("outrider_spec_decode_class_draft_tokens_per_pos", "position")
    accepted = growth("outrider_spec_decode_class_accepted_tokens_per_pos", "position")
    return sum(drafted.values()), sum(accepted.values())


def _growth(before: Reading, now: Reading, name: str, *labels: str) -> dict[tuple[str, ...], float]:
    """Return the growth of a counter, summed by one label or more; one that was reset counts from 0."""
    sums: dict[tuple[str, ...], float] = defaultdict(float)
    earlier = before.get(name, {})
    for key, value in now.get(name, {}).items():
        named = dict(key)
        old = earlier.get(key, 0.0)
        sums[tuple(named.get(label, "") for label in labels)] += value - old if value >= old else value
    return sums


def _by(reading: Reading, name: str, label: str) -> dict[str, list[float]]:
    values: dict[str, list[float]] = defaultdict(list)
    for key, value in reading.get(name, {}).items():
        values[dict(key).get(label, "")].append(value)
    return values


def _gauge(reading: Reading, name: str, replica: str) -> float:
    return sum(_by(reading, name, "replica").get(replica, [0.0]))


def _pairs(growth: Growth, now: Reading) -> tuple[PairFigures, ...]:
    accepted = growth("outrider_spec_decode_num_accepted_tokens", "replica")
    drafts = growth("outrider_spec_decode_num_drafts", "replica")
    shapes = growth("outrider_spec_decode_passes", "replica", "shape")
    return tuple(
        PairFigures(
            replica=replica,
            num_running=int(_gauge(now, "outrider_num_requests_running", replica)),
            num_waiting=int(_gauge(now, "outrider_num_requests_waiting", replica)),
            kv_usage=_gauge(now, "outrider_kv_cache_usage", replica),
            tokens_per_pass=1 + accepted[replica,] / drafts[replica,] if drafts.get((replica,)) else None,
            is_draft_away=_gauge(now, "outrider_draft_num_connections", replica) > 0
            and 0.0 in _by(now, "outrider_draft_connected", "replica").get(replica, ()),
            shapes=_shares({shape: number for (pair, shape), number in sorted(shapes.items()) if pair == replica}),
        )
        for replica in sorted(_by(now, "outrider_kv_cache_usage", "replica"))
    )


def _shares(numbers: dict[str, float]) -> str:
    total = sum(numbers.values())
    return ", ".join(f"{name} {number / total:.0%}" for name, number in numbers.items() if number)


def _classes(growth: Growth, now: Reading) -> tuple[ClassFigures, ...]:
    labels = ("method", "class", "position")
    drafted = growth("outrider_spec_decode_class_draft_tokens_per_pos", *labels)
    accepted = growth("outrider_spec_decode_class_accepted_tokens_per_pos", *labels)
    alarmed = {
        name for name, values in _by(now, "outrider_spec_decode_drift_alarm", "class").items() if max(values, default=0)
    }
    shares: dict[str, dict[int, float | None]] = defaultdict(dict)
    for (method, traffic, position), number in drafted.items():
        share = accepted[method, traffic, position] / number if number else None
        shares[f"{method}-{traffic}"][int(position)] = share
    return tuple(
        ClassFigures(name, tuple(share for _, share in sorted(by_position.items())), name in alarmed)
        for name, by_position in sorted(shares.items())
    )


def _alarms(now: Reading, pairs: tuple[PairFigures, ...], classes: tuple[ClassFigures, ...]) -> tuple[str, ...]:
    """Return the alarms of docs/watch/alerts.yaml that one reading can detect."""
    alarms = [f"acceptance of {each.name} is far below the usual" for each in classes if each.is_alarmed]
    alarms += [f"the draft of pair {pair.replica} is away" for pair in pairs if pair.is_draft_away]
    alarms += [f"the KV cache of pair {pair.replica} is full" for pair in pairs if pair.kv_usage > 0.95]
    if any(now.get("outrider_router_blind", {}).values()):
        alarms.append("the router's index gets no reports of the pairs' caches")
    return tuple(alarms)
