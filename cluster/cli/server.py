"""The server that client commands use: their options and checks, and the figures of two readings of its `/metrics`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import typer
from openai import APIConnectionError, OpenAI, OpenAIError
from prometheus_client.parser import text_string_to_metric_families
from typer import Option

from protos.errors import ConfigError, ServingError

URL = "http://127.0.0.1:8000/v1"
API_KEY = "none"

NOT_UNDERSTOOD = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)

Reading = Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]
Growth = Callable[..., dict[tuple[str, ...], float]]  # of a counter by its name, and by the values of some labels


class AnswerError(ServingError):
    """A server refuses a request, or its answer cannot be read."""


@contextmanager
def understood(what: str = "the server's answer") -> Iterator[None]:
    """Raise AnswerError if a request cannot be sent, a server refuses it, or `what` has an unexpected form."""
    try:
        yield
    except (OpenAIError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise AnswerError(str(error)) from None
    except UnicodeEncodeError as error:
        raise AnswerError(f"the request is not UTF-8 text: {error}") from None
    except NOT_UNDERSTOOD as error:
        raise AnswerError(f"{what} has an unexpected form: {type(error).__name__}: {error}") from None


def base_url(url: str | None) -> str | None:
    """Return the address of the API, None without one. An address without a path gets /v1.

    Raises:
        ConfigError: it is not the address of a web server.
    """
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(f"--url {url!r} is not the address of a server; give one such as {URL}")
    return url.rstrip("/") + "/v1" if parts.path in {"", "/"} else url


def header_value(key: str) -> str:
    """Return a key. Raises ConfigError if an HTTP header cannot carry it."""
    if not (key.isascii() and key.isprintable()):
        raise ConfigError("--api-key has a character that an HTTP header cannot carry; use printable ASCII")
    return key


ServerUrl = Annotated[str, Option(help="base address of the server, with or without /v1", callback=base_url)]
ApiKey = Annotated[
    str, Option("--api-key", "--key", envvar="OPENAI_API_KEY", help="key of the server", callback=header_value)
]


def finite(value: float | None) -> float | None:
    """Reject NaN and infinity."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def request_page(url: str, api_key: str, path: str, body: Any = None, timeout_s: float = 5.0) -> httpx.Response:
    """Return a page of the server at `url` that is not below /v1; POST a `body`. Raises httpx.HTTPError."""
    address = url.rstrip("/").removesuffix("/v1") + path
    headers = {"Authorization": f"Bearer {api_key}"}
    return httpx.request("GET" if body is None else "POST", address, json=body, headers=headers, timeout=timeout_s)


def served_model(url: str, api_key: str, model: str | None) -> str:
    """Return `model` if the server has it, or the server's first model if it is None.

    Raises:
        ConfigError: the server does not respond, refuses the key, or has no such model.
    """
    try:
        with understood(), OpenAI(base_url=url, api_key=api_key, timeout=10.0, max_retries=0) as client:
            names = _model_names(client, url)
    except AnswerError as error:
        raise ConfigError(f"the server at {url} does not list its models: {error}") from None
    if model is None and names:
        return names[0]
    if model is None or model not in names:
        raise ConfigError(f"the server at {url} has no model {model!r}; it has {', '.join(names) or 'none'}")
    return model


def _model_names(client: OpenAI, url: str) -> list[str]:
    try:
        names = [each.id for each in client.models.list().data]
    except APIConnectionError:
        raise ConfigError(f"no server answers at {url}; start one (`outrider serve demo`), or give --url") from None
    if not all(isinstance(name, str) for name in names):
        raise TypeError("a model has no name")
    return names


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
