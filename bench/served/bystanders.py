"""Streams of fixed seeds beside a load: whether their texts stay what they are, and how long they had to wait."""

from __future__ import annotations

import multiprocessing
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import TracebackType

import httpx
import msgspec

_NUM_TOKENS = 96
_TIMEOUT_S = 120.0
_REFUSED_PAUSE_S = 0.2


@dataclass(frozen=True, slots=True)
class Stay:
    """What the bystanders met since the last report, and their longest wait; refused is 503 with Retry-After."""

    num_streams: int = 0
    num_changed: int = 0
    num_refused: int = 0
    failures: tuple[str, ...] = ()
    longest_gap_s: float = 0.0


class Bystanders:
    """A process of its own with one stream after the other per seed, so that what it waits for is not its caller.

    The first stream of each seed, before the constructor returns, says what its text is.

    Raises:
        RuntimeError: a first stream failed.
    """

    def __init__(self, base_url: str, model: str, num_seeds: int = 3) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_stand_by, args=(theirs, base_url, model, num_seeds), daemon=True)
        self._process.start()
        first = self._receive()
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


class _Seed:
    """The streams of one seed, and what was met since the last report."""

    def __init__(self, base_url: str, model: str, seed: int) -> None:
        self._url = f"{base_url}/v1/completions"
        self._body = {
            "model": model,
            "prompt": f"def function_{seed}(path):\n",
            "max_tokens": _NUM_TOKENS,
            "temperature": 0.8,
            "seed": seed,
            "ignore_eos": True,
            "stream": True,
        }
        self._text: str | None = None
        self._lock = threading.Lock()
        self._stay = Stay()
        self._arrived_s = time.monotonic()

    def stream(self) -> None:
        """Stream once and compare."""
        text, failure, gap_s = "", None, 0.0
        self._arrived_s = time.monotonic()
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=_TIMEOUT_S) as answer:
                if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and "retry-after" in answer.headers:
                    self._add(Stay(num_refused=1))
                    time.sleep(_REFUSED_PAUSE_S)
                    return
                if answer.status_code != httpx.codes.OK:
                    failure = f"HTTP {answer.status_code}"
                for line in answer.iter_lines():
                    text += _text_of(line)
                    now_s = time.monotonic()
                    gap_s, self._arrived_s = max(gap_s, now_s - self._arrived_s), now_s
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            failure = f"{type(error).__name__}: {error}"
        if self._text is None:
            self._text = text
        has_changed = failure is None and text != self._text
        self._add(Stay(1, int(has_changed), 0, (failure,) if failure else (), gap_s))

    def _add(self, stay: Stay) -> None:
        with self._lock:
            self._stay = _sum([self._stay, stay])

    def take(self) -> Stay:
        """Return what was met since the last call, the wait that still lasts included."""
        with self._lock:
            stay, self._stay = self._stay, Stay()
        return _sum([stay, Stay(longest_gap_s=time.monotonic() - self._arrived_s)])

    def stream_for_ever(self) -> None:
        while True:
            self.stream()


def _stand_by(pipe: Connection, base_url: str, model: str, num_seeds: int) -> None:
    seeds = [_Seed(base_url, model, seed) for seed in range(num_seeds)]
    for seed in seeds:
        seed.stream()
    pipe.send(_sum([seed.take() for seed in seeds]))
    for seed in seeds:
        threading.Thread(target=seed.stream_for_ever, daemon=True).start()
    while True:
        pipe.recv()
        pipe.send(_sum([seed.take() for seed in seeds]))


def _sum(stays: list[Stay]) -> Stay:
    return Stay(
        sum(stay.num_streams for stay in stays),
        sum(stay.num_changed for stay in stays),
        sum(stay.num_refused for stay in stays),
        tuple(failure for stay in stays for failure in stay.failures),
        max(stay.longest_gap_s for stay in stays),
    )


def _text_of(line: str) -> str:
    """Return the text of one line of server-sent events."""
    if not line.startswith("data: {"):
        return ""
    event = msgspec.json.decode(line.removeprefix("data: "))
    if "error" in event:
        raise httpx.RemoteProtocolError(str(event["error"]))
    return "".join(choice.get("text", "") for choice in event["choices"])
