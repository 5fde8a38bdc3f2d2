"""Streams of fixed seeds during a load: whether their texts stay the same, and how long they wait."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType

import httpx
import msgspec

_TIMEOUT_S = 120.0
_PAUSE_S = 0.2  # after a refusal or a failure


@dataclass(frozen=True, slots=True)
class Habits:
    """The requests of bystanders: prompts of `num_lines`, one per seed; if `is_cold`, no cache holds them.

    `key` is their API key; any if the server needs none.
    """

    num_seeds: int = 3
    num_tokens: int = 96
    num_lines: int = 1
    is_cold: bool = False
    key: str = "none"


@dataclass(frozen=True, slots=True)
class Failure:
    """A failed stream: the reason, the times of request and failure (monotonic), and the tokens so far."""

    reason: str
    sent_s: float
    failed_s: float
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.reason} ({self.failed_s - self.sent_s:.1f} s after it was sent, {self.num_tokens} tokens)"


@dataclass(frozen=True, slots=True)
class Stay:
    """The bystanders' streams since the last report; a refusal is 503 with Retry-After.

    `longest_start_s` is the longest wait for a stream's first event, `longest_gap_s` the longest wait between events,
    and `longest_outage_s` the longest time from a stream's failure to the first event of its client's next stream.

    A failed stream counts as changed if its text is no prefix of the right one. `num_tokens_off` counts the missing and
    surplus tokens of complete streams; `strange` has the texts of changed streams, with their seeds.
    """

    num_streams: int = 0
    num_changed: int = 0
    num_refused: int = 0
    failures: tuple[Failure, ...] = ()
    longest_start_s: float = 0.0
    longest_gap_s: float = 0.0
    longest_outage_s: float = 0.0
    num_tokens_off: int = 0
    strange: tuple[tuple[int, str], ...] = ()

    @property
    def longest_stall_s(self) -> float:
        return max(self.longest_start_s, self.longest_gap_s)


class Bystanders:
    """Streams in a process of their own, one after the other for each seed, so that the caller never delays them.

    The constructor streams each seed once, to get its right text.

    Raises:
        RuntimeError: a first stream failed.
    """

    def __init__(self, base_url: str, model: str, habits: Habits = Habits()) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_stand_by, args=(theirs, base_url, model, habits), daemon=True)
        self._process.start()
        first = self._receive()
        self.texts = dict(first.strange)  # by seed
        if first.failures:
            self.close()
            raise RuntimeError(f"bystanders cannot stream from {base_url}: {first.failures[0]}")

    def report(self) -> Stay:
        """Return the streams since the last report."""
        self._pipe.send(None)
        return self._receive()

    def _receive(self) -> Stay:
        if not self._pipe.poll(2 * _TIMEOUT_S):
            raise RuntimeError("the bystanders' process does not answer")
        stay: Stay = self._pipe.recv()
        return stay

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()

    def __enter__(self) -> Bystanders:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class _Came:
    """The outcome of one stream so far."""

    def __init__(self) -> None:
        self.text = ""
        self.num_tokens = 0

    def read(self, line: str) -> None:
        """Add one line of server-sent events.

        Raises:
            httpx.RemoteProtocolError: the line is the server's error.
        """
        if not line.startswith("data: {"):
            return
        event = msgspec.json.decode(line.removeprefix("data: "))
        if "error" in event:
            raise httpx.RemoteProtocolError(str(event["error"]))
        for choice in event["choices"]:
            self.text += choice.get("text", "")
            self.num_tokens += len(choice.get("token_ids") or ())


class _Seed:
    """The streams of one seed, and their outcome since the last report."""

    def __init__(self, base_url: str, model: str, seed: int, habits: Habits) -> None:
        self._url = f"{base_url}/v1/completions"
        self._headers = {"Authorization": f"Bearer {habits.key}"}
        self._seed = seed
        self._habits = habits
        lines = [f"def function_{seed}_{index}(path):\n" for index in range(habits.num_lines - 1)]
        self._body = {
            "model": model,
            "prompt": "".join([*lines, f"def function_{seed}(path):\n"]),
            "max_tokens": habits.num_tokens,
            "temperature": 0.8,
            "seed": seed,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        self._text: str | None = None
        self._lock = threading.Lock()
        self._stay = Stay()
        self._arrived_s = time.monotonic()  # the last event, or the request
        self._has_begun = False
        self._failed_s: float | None = None  # the first failure since the last stream that began
        self._number = 0

    def stream(self) -> None:
        """Stream once and compare."""
        self._number += 1
        body = {**self._body, "cache_salt": f"{self._seed}-{self._number}"} if self._habits.is_cold else self._body
        came = _Came()
        failure = None
        sent_s = time.monotonic()
        self._arrived_s, self._has_begun = sent_s, False
        try:
            # verify=True would load certificates for each stream, on the cores that are measured.
            with httpx.stream(
                "POST", self._url, json=body, headers=self._headers, timeout=_TIMEOUT_S, verify=False
            ) as answer:
                if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and "retry-after" in answer.headers:
                    self._add(Stay(num_refused=1))
                    time.sleep(_PAUSE_S)
                    return
                if answer.status_code != httpx.codes.OK:
                    failure = f"HTTP {answer.status_code}"
                for line in () if failure else answer.iter_lines():
                    came.read(line)
                    self._add(self._wait())
                    self._arrived_s, self._has_begun, self._failed_s = time.monotonic(), True, None
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            failure = f"{type(error).__name__}: {error}"
        if failure:
            self._add(self._wait())
        failed = Failure(failure, sent_s, time.monotonic(), came.num_tokens) if failure else None
        self._add(self._compared(came, failed))
        if failed:
            self._failed_s = self._failed_s or time.monotonic()
            time.sleep(_PAUSE_S)

    def _compared(self, came: _Came, failure: Failure | None) -> Stay:
        if self._text is None and failure is None:
            self._text = came.text
            return Stay(1, strange=((self._seed, came.text),))
        known = self._text or ""
        if failure is not None:
            is_changed = not known.startswith(came.text)
            return Stay(1, int(is_changed), failures=(failure,), strange=self._strange(is_changed, came))
        is_changed = came.text != known
        off = abs(came.num_tokens - self._habits.num_tokens)
        return Stay(1, int(is_changed), num_tokens_off=off, strange=self._strange(is_changed, came))

    def _strange(self, is_changed: bool, came: _Came) -> tuple[tuple[int, str], ...]:
        return ((self._seed, came.text),) if is_changed else ()

    def _add(self, stay: Stay) -> None:
        with self._lock:
            self._stay = total([self._stay, stay])

    def take(self) -> Stay:
        """Return the streams since the last call, including the present wait."""
        with self._lock:
            stay, self._stay = self._stay, Stay()
        return total([stay, self._wait()])

    def _wait(self) -> Stay:
        now_s = time.monotonic()
        seconds = now_s - self._arrived_s
        if self._has_begun:
            return Stay(longest_gap_s=seconds)
        return Stay(longest_start_s=seconds, longest_outage_s=0.0 if self._failed_s is None else now_s - self._failed_s)

    def stream_for_ever(self) -> None:
        while True:
            self.stream()


def _stand_by(pipe: Connection, base_url: str, model: str, habits: Habits) -> None:
    seeds = [_Seed(base_url, model, seed, habits) for seed in range(habits.num_seeds)]
    for seed in seeds:
        seed.stream()
    pipe.send(total([seed.take() for seed in seeds]))
    for seed in seeds:
        threading.Thread(target=seed.stream_for_ever, daemon=True).start()
    while True:
        pipe.recv()
        pipe.send(total([seed.take() for seed in seeds]))


def total(stays: Sequence[Stay]) -> Stay:
    """Return the sum of all reports."""
    return Stay(
        sum(stay.num_streams for stay in stays),
        sum(stay.num_changed for stay in stays),
        sum(stay.num_refused for stay in stays),
        tuple(failure for stay in stays for failure in stay.failures),
        max(stay.longest_start_s for stay in stays),
        max(stay.longest_gap_s for stay in stays),
        max(stay.longest_outage_s for stay in stays),
        sum(stay.num_tokens_off for stay in stays),
        tuple(text for stay in stays for text in stay.strange),
    )
