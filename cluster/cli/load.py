"""Load of many users on an OpenAI server, and its latencies.

In a closed loop `concurrency` users each send their next request when the last has ended. In an open loop requests come
at Poisson times of a rate, and a late answer delays no other: latency counts from a request's scheduled time.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from openai import AsyncOpenAI

from cluster.cli.server import AnswerError, understood


@dataclass(frozen=True, slots=True)
class Load:
    """Requests to send: `rate` per second, or `concurrency` at a time if `rate` is None."""

    model: str
    prompts: tuple[str, ...]
    max_tokens: int
    temperature: float
    concurrency: int
    rate: float | None
    seed: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Timing:
    """One request: the seconds of its due time, its first and its last text, and the gaps between its chunks."""

    due_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    num_tokens: int = 0
    gaps_s: tuple[float, ...] = ()
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.due_s

    @property
    def itl_s(self) -> float:
        """Mean seconds per token after the first; a chunk of speculation holds several."""
        return (self.last_s - self.first_s) / max(1, self.num_tokens - 1)


@dataclass(frozen=True, slots=True)
class Objective:
    """The limits that a request must keep to count for goodput."""

    ttft_s: float
    itl_s: float

    def is_met(self, timing: Timing) -> bool:
        """True if the request succeeded within both limits."""
        return timing.error is None and timing.ttft_s <= self.ttft_s and timing.itl_s <= self.itl_s


def due_times(count: int, rate: float, seed: int) -> list[float]:
    """Return Poisson arrival times in seconds, the first one at 0."""
    noise = random.Random(seed)
    times = [0.0]
    while len(times) < count:
        times.append(times[-1] + noise.expovariate(rate))
    return times[:count]


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of the values do not exceed; NaN without values."""
    if not values:
        return float("nan")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]


async def run_load(client: AsyncOpenAI, load: Load) -> list[Timing]:
    """Send every prompt once; failed requests are counted, and the load goes on."""
    if load.rate is None:
        return await _closed_loop(client, load)
    began_s = time.monotonic()
    due = due_times(len(load.prompts), load.rate, load.seed)
    return list(
        await asyncio.gather(
            *(_send_at(client, load, prompt, began_s + at) for prompt, at in zip(load.prompts, due, strict=True))
        )
    )


async def _closed_loop(client: AsyncOpenAI, load: Load) -> list[Timing]:
    prompts = iter(load.prompts)
    timings: list[Timing] = []

    async def user() -> None:
        for prompt in prompts:
            timings.append(await _send_at(client, load, prompt, time.monotonic()))

    await asyncio.gather(*(user() for _ in range(load.concurrency)))
    return timings


async def _send_at(client: AsyncOpenAI, load: Load, prompt: str, due_s: float) -> Timing:
    await asyncio.sleep(due_s - time.monotonic())
    try:
        async with asyncio.timeout(load.timeout_s):
            with understood():
                return await _send(client, load, prompt, due_s)
    except (AnswerError, TimeoutError) as error:
        return Timing(due_s, error=str(error) or f"no answer within {load.timeout_s:.0f} s")


async def _send(client: AsyncOpenAI, load: Load, prompt: str, due_s: float) -> Timing:
    stream = await client.completions.create(
        model=load.model,
        prompt=prompt,
        max_tokens=load.max_tokens,
        temperature=load.temperature,
        stream=True,
        stream_options={"include_usage": True},
    )
    times: list[float] = []
    num_tokens, is_finished = 0, False
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].text:
            times.append(time.monotonic())
        is_finished |= any(choice.finish_reason for choice in chunk.choices or ())
        if chunk.usage is not None:
            num_tokens = int(chunk.usage.completion_tokens or 0)
    if not is_finished:
        return Timing(due_s, error="the answer broke off")
    if not times:
        return Timing(due_s, error="an answer without text")
    gaps = tuple(after - before for before, after in pairwise(times))
    return Timing(due_s, times[0], times[-1], num_tokens or len(times), gaps)
