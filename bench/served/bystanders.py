"""Streams of fixed seeds beside a load: whether their texts stay what they are, and how long they had to wait."""

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
    """The requests of bystanders. Each of `num_seeds` has a prompt of so many lines; cold ones find nothing cached."""

    num_seeds: int = 3
    num_tokens: int = 96
    num_lines: int = 1
    is_cold: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """A stream that failed: why, when it was sent and when it failed (monotonic time), and the tokens until then."""

    reason: str
    sent_s: float
    failed_s: float
    num_tokens: int

    def __str__(self) -> str:
        return f"{self.reason} ({self.failed_s - self.sent_s:.1f} s after it was sent, {self.num_tokens} tokens)"


@dataclass(frozen=True, slots=True)
class Stay:
    """The streams of the bystanders since the last report; refused is 503 with Retry-After.

    Their longest waits are those for a stream's first event, and between its events; the longest outage is the time
    from the failure of a stream until its client has the first event of another.

    A stream that fails counts as changed if what came before is no beginning of its text. `num_tokens_off` are the
    tokens that whole streams had too few or too many; `strange` are the texts of changed ones, with their seeds.
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
    """A process of its own with one stream after the other per seed, so that what it waits for is not its caller.

    The first stream of each seed, before the constructor returns, says what its text is.

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
        """Return what was met since the last report."""
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
    """The streams of one seed, and what was met since the last report."""

    def __init__(self, base_url: str, model: str, seed: int, habits: Habits) -> None:
        self._url = f"{base_url}/v1/completions"
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
        self._failed_s: float | None = None  # since when no stream has begun
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
            # No certificates, which would be read for each stream, on the cores that what is measured computes on.
            with httpx.stream("POST", self._url, json=body, timeout=_TIMEOUT_S, verify=False) as answer:
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
        self._add(self._judged(came, failed))
        if failed:
            self._failed_s = self._failed_s or time.monotonic()
            time.sleep(_PAUSE_S)

    def _judged(self, came: _Came, failure: Failure | None) -> Stay:
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
        """Return what was met since the last call, the wait that still lasts included."""
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
    """Return what was met in all of them."""
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
