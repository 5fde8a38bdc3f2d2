"""Loads of a number of streams: a steady one, and a change from one stream to many and back.

A seat asks again as soon as its answer ends, so the number of streams is constant, and a stream that ends early leaves
no gap. In a change of load one seat is taken all the time, the others in the second third.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import chain, pairwise

from bench.contenders.event_streams import Body, EventRequest, post

TIMEOUT_S = 600.0
FIRST_S = 2.0  # of a phase: by then a change should be followed
_WINDOW_S = 0.5
_NEAR = 0.9  # of the later speed


@dataclass(frozen=True, slots=True)
class Phase:
    """The speed in one third of a run, of all streams together: in its first seconds, and after them.

    `followed_s` are the seconds from the change to the first window of half a second with 0.9 of the later speed.
    """

    num_streams: int
    first_tokens_per_second: float
    tokens_per_second: float
    followed_s: float


def run_steady(url: str, bodies: Iterator[Body], num_streams: int, seconds: float) -> float:
    """Return the tokens per second of a steady load, without its first quarter.

    First answers have different lengths, so that later ones begin one by one.

    Raises:
        RuntimeError: an answer is an error.
        TimeoutError: the run has not ended within `TIMEOUT_S`.
    """
    began = time.perf_counter()
    seats = asyncio.run(asyncio.wait_for(_run_steady(url, bodies, num_streams, seconds), TIMEOUT_S))
    counted = (number for seat in seats for at, number in _arrivals(seat, began) if seconds / 4 <= at < seconds)
    return sum(counted) / (0.75 * seconds)


def run_change(url: str, bodies: Iterator[Body], num_streams: int, phase_s: float) -> list[Phase]:
    """Run the three phases, of `phase_s` each, with requests from `bodies`.

    The third phase begins when the last answer of the others has ended.

    Raises:
        RuntimeError: an answer is an error.
        TimeoutError: the run has not ended within `TIMEOUT_S`.
    """
    began = time.perf_counter()
    seats = asyncio.run(asyncio.wait_for(_run(url, bodies, num_streams, phase_s), TIMEOUT_S))
    arrivals = [sorted(_arrivals(seat, began)) for seat in seats]
    everywhere = sorted(each for seat in arrivals for each in seat)
    back_s = max((seat[-1][0] for seat in arrivals[1:] if seat), default=2 * phase_s)
    bounds = (0.0, phase_s, back_s, max(back_s, everywhere[-1][0]))
    numbers = (1, num_streams, 1)
    return [_phase(everywhere, span, number) for span, number in zip(pairwise(bounds), numbers, strict=True)]


async def _run_steady(url: str, bodies: Iterator[Body], num_streams: int, seconds: float) -> list[list[EventRequest]]:
    began_s = _now()
    firsts = [next(bodies) for _ in range(num_streams)]
    for index, body in enumerate(firsts, 1):
        body["max_tokens"] = max(1, body["max_tokens"] * index // num_streams)
    seats = (_sit(url, chain([body], bodies), began_s, began_s + seconds) for body in firsts)
    return await asyncio.gather(*seats)


async def _run(url: str, bodies: Iterator[Body], num_streams: int, phase_s: float) -> list[list[EventRequest]]:
    began_s = _now()
    back_s = began_s + 2 * phase_s
    first, *others = await asyncio.gather(
        _sit(url, bodies, began_s, back_s),
        *(_sit(url, bodies, began_s + phase_s, back_s) for _ in range(num_streams - 1)),
    )
    return [first + await _sit(url, bodies, _now(), _now() + phase_s), *others]


async def _sit(url: str, bodies: Iterator[Body], begin_s: float, end_s: float) -> list[EventRequest]:
    """Send one request after the other, and return all of them."""
    await asyncio.sleep(begin_s - _now())
    requests = []
    while _now() < end_s:
        requests.append(await post(url, next(bodies)))
        await requests[-1].has_ended
    return requests


def _now() -> float:
    return asyncio.get_running_loop().time()


def _arrivals(requests: Seq[EventRequest], began: float) -> Iterator[tuple[float, int]]:
    """Yield the seconds and the number of tokens of each event."""
    for request in requests:
        for event in request.events(began):
            yield event.seconds, sum(len(each["token_ids"] or ()) for each in event.data.get("choices", ()))


def _phase(arrivals: Seq[tuple[float, int]], span: tuple[float, float], num_streams: int) -> Phase:
    begin, end = span

    def speed(first: float, last: float) -> float:
        return sum(number for seconds, number in arrivals if first <= seconds < last) / max(last - first, 1e-9)

    middle = min(begin + FIRST_S, (begin + end) / 2)
    later = speed(middle, end)
    at = begin
    while at + _WINDOW_S < end and speed(at, at + _WINDOW_S) < _NEAR * later:
        at += _WINDOW_S / 2
    return Phase(num_streams, speed(begin, middle), later, at - begin)
