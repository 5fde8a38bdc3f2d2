"""`outrider bench`: latencies and goodput of any OpenAI server under load."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from openai import AsyncOpenAI
from rich.table import Table
from typer import Option

from cluster.cli import console, report
from cluster.cli.server import API_KEY, URL, AnswerError, ApiKey, ServerUrl, finite, served_model, understood
from protos.errors import ConfigError

_WORDS = ("the", "def", "return", "value", "of", "list", "in", "for", "file", "with", "name", "is", "to", "self", "new")


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

    def is_within(self, ttft_s: float, itl_s: float) -> bool:
        """True if the request succeeded within both limits, and so counts for goodput."""
        return self.error is None and self.ttft_s <= ttft_s and self.itl_s <= itl_s


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
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


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


def bench(
    url: ServerUrl = URL,
    model: Annotated[str | None, Option(help="default: the first model of the server")] = None,
    api_key: ApiKey = API_KEY,
    num_requests: Annotated[int, Option("--num-requests", "-n", min=1, help="requests to send")] = 32,
    concurrency: Annotated[int, Option(min=1, help="users, each with one request at a time")] = 4,
    rate: Annotated[
        float | None, Option(min=1e-3, callback=finite, help="requests per second, in place of --concurrency")
    ] = None,
    prompts: Annotated[Path | None, Option(help="a file with one prompt per line; default: random words")] = None,
    prompt_words: Annotated[int, Option(min=1, help="length of a random prompt")] = 96,
    max_tokens: Annotated[int, Option(min=1, help="length of an answer")] = 64,
    temperature: Annotated[float, Option(min=0.0, callback=finite)] = 0.0,
    seed: Annotated[int, Option(help="seed of prompts and arrivals")] = 0,
    ttft_ms: Annotated[
        float, Option(min=0.0, callback=finite, help="goodput: longest wait for the first token")
    ] = 1000.0,
    itl_ms: Annotated[
        float, Option(min=0.0, callback=finite, help="goodput: longest mean wait per later token")
    ] = 100.0,
    timeout_s: Annotated[float, Option(min=0.1, callback=finite, help="time-out of one request")] = 300.0,
) -> None:
    """Measure an OpenAI server: TTFT, inter-token latency, tokens per second and goodput."""
    load = Load(
        model=served_model(url, api_key, model),
        prompts=_prompts(prompts, num_requests, prompt_words, seed),
        max_tokens=max_tokens,
        temperature=temperature,
        concurrency=concurrency,
        rate=rate,
        seed=seed,
        timeout_s=timeout_s,
    )
    began_s = time.monotonic()
    timings = asyncio.run(_run(url, api_key, load))
    lasted_s = time.monotonic() - began_s
    console.print(_table(timings, lasted_s, ttft_ms, itl_ms, load))
    for message in sorted({timing.error for timing in timings if timing.error})[:3]:
        report(f"failed: {message}")
    if all(timing.error for timing in timings):
        raise typer.Exit(1)


async def _run(url: str, api_key: str, load: Load) -> list[Timing]:
    async with AsyncOpenAI(base_url=url, api_key=api_key, max_retries=0) as client:
        return await run_load(client, load)


def _prompts(file: Path | None, count: int, num_words: int, seed: int) -> tuple[str, ...]:
    if file is None:
        noise = random.Random(seed)
        return tuple(" ".join(noise.choices(_WORDS, k=num_words)) for _ in range(count))
    try:
        lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts cannot be read: {error}; give a text file with one prompt per line") from None
    if not lines:
        raise ConfigError(f"--prompts {file} has no lines; give one prompt per line")
    return tuple(lines[index % len(lines)] for index in range(count))


def _table(timings: Sequence[Timing], lasted_s: float, ttft_ms: float, itl_ms: float, load: Load) -> Table:
    done = [timing for timing in timings if timing.error is None]
    way = f"{load.concurrency} at a time" if load.rate is None else f"{load.rate:g} per second"
    table = Table(title=f"{load.model}: {len(timings)} requests, {way}, {lasted_s:.1f} s", title_justify="left")
    table.add_column("")
    for name in ("p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for name, values in (
        ("first token (ms)", [each.ttft_s for each in done]),
        ("per later token (ms)", [each.itl_s for each in done if each.num_tokens > 1]),
        ("gap between chunks (ms)", [gap for each in done for gap in each.gaps_s]),
        ("whole answer (ms)", [each.last_s - each.due_s for each in done]),
    ):
        table.add_row(name, *(f"{1000 * quantile(values, share):.1f}" for share in (0.5, 0.9, 0.99)))
    num_good = sum(each.is_within(ttft_ms / 1000, itl_ms / 1000) for each in timings)
    table.add_section()
    table.add_row("output tokens per second", f"{sum(each.num_tokens for each in done) / lasted_s:.1f}")
    table.add_row("requests per second", f"{len(done) / lasted_s:.2f}")
    table.add_row("goodput (requests per second)", f"{num_good / lasted_s:.2f}", f"{num_good / len(timings):.0%}")
    table.add_row("failed", str(len(timings) - len(done)))
    table.caption = f"goodput: first token within {ttft_ms:g} ms, {itl_ms:g} ms a token"
    return table
