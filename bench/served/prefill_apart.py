"""The gaps that long prompts leave in a stream beside them, with and without a prefill replica.

    python -m bench.served.prefill_apart --prompt-tokens 4096 --period 4 --seconds 20 --json gaps.json --plot gaps.png

One stream decodes all the time. First it is alone; then a prompt of `--prompt-tokens` tokens, new to every cache,
arrives each `--period` seconds. The time between two chunks of the stream is what a reader of it feels. Both
deployments are measured `--rounds` times in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bench.contenders.prompts import held_out_prompts
from bench.served.application import ServedApplication
from bench.served.gap_plot import plot_gaps

HTTP_PORT = 8120
GRPC_PORT = 9120
FOLDER = Path(".cache/bench")
URL = f"http://127.0.0.1:{HTTP_PORT}"
_WARM_UP_CHUNKS = 64
_STREAM_TOKENS = 7000  # of one request; another follows


@dataclass(frozen=True, slots=True)
class Gaps:
    """Milliseconds between chunks of the running stream."""

    num_gaps: int
    p50_ms: float
    p99_ms: float
    max_ms: float
    all_ms: list[float]

    @classmethod
    def of(cls, times_s: list[float]) -> Gaps:
        gaps = [round(float(gap), 2) for gap in 1000 * np.diff(times_s)]
        p50, p99 = (round(float(each), 1) for each in np.percentile(gaps, (50, 99)))
        return cls(len(gaps), p50, p99, round(max(gaps), 1), gaps)


@dataclass(frozen=True, slots=True)
class Row:
    """One deployment in one round."""

    num_prefills: int
    quiet: Gaps
    loaded: Gaps
    prompt_ttft_mean_s: float
    num_prompts: int
    num_remote_tokens: int
    num_local_tokens: int


class Stream:
    """Decodes from a short prompt until it is cancelled, and notes when each chunk comes."""

    def __init__(self, client: httpx.AsyncClient, prompt: list[int]) -> None:
        self.times_s: list[float] = []
        self.is_warm = asyncio.Event()
        self._client = client
        self._prompt = prompt

    async def run(self) -> None:
        for seed in count():
            body = {"prompt": self._prompt, "max_tokens": _STREAM_TOKENS, "seed": seed, "temperature": 1.0}
            async for at_s in chunk_times(self._client, body):
                self.times_s.append(at_s)
                if len(self.times_s) == _WARM_UP_CHUNKS:
                    self.is_warm.set()

    def between(self, start_s: float, end_s: float) -> list[float]:
        return [at_s for at_s in self.times_s if start_s <= at_s < end_s]


async def chunk_times(client: httpx.AsyncClient, body: dict[str, Any]) -> AsyncGenerator[float, None]:
    """Measure the arrival of each chunk of tokens of a streamed completion."""
    body = {"model": "outrider-demo", "stream": True, "ignore_eos": True, "return_token_ids": True, **body}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if '"token_ids":[' in line.replace(" ", "") and '"token_ids":[]' not in line.replace(" ", ""):
                yield time.perf_counter()


async def first_token_s(client: httpx.AsyncClient, prompt: list[int], salt: str) -> float:
    """Seconds to the first token of a prompt that no cache holds."""
    began_s = time.perf_counter()
    async for at_s in chunk_times(client, {"prompt": prompt, "max_tokens": 1, "cache_salt": salt, "temperature": 0.0}):
        return at_s - began_s
    raise RuntimeError("a prompt was answered without a token")


async def measure(options: argparse.Namespace, num_prefills: int) -> Row:
    """Return one round against the application that runs."""
    model = Path(options.model)
    (short,) = held_out_prompts(model, 1)
    long = long_prompt(model, options.prompt_tokens)
    async with httpx.AsyncClient(base_url=URL, timeout=300.0) as client:
        salts = (f"{num_prefills} {number}" for number in count())
        for _ in range(2):  # rates are measured, and connections made
            await first_token_s(client, long, next(salts))
        stream = Stream(client, short)
        async with running(stream):
            quiet = await watch(stream, options.seconds)
            before = await prefill_tokens(client)
            loads = asyncio.create_task(arrivals(client, long, salts, options))
            loaded = await watch(stream, options.seconds)
            ttfts_s = await loads
            after = await prefill_tokens(client)
    return Row(
        num_prefills=num_prefills,
        quiet=quiet,
        loaded=loaded,
        prompt_ttft_mean_s=round(float(np.mean(ttfts_s)), 3),
        num_prompts=len(ttfts_s),
        num_remote_tokens=after["remote"] - before["remote"],
        num_local_tokens=after["local"] - before["local"],
    )


@asynccontextmanager
async def running(stream: Stream) -> AsyncGenerator[None, None]:
    """Keep the stream running, from its first tokens to the end of the block."""
    task = asyncio.create_task(stream.run())
    try:
        await stream.is_warm.wait()
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def watch(stream: Stream, seconds: float) -> Gaps:
    """Return the stream's gaps during the next `seconds`."""
    began_s = time.perf_counter()
    await asyncio.sleep(seconds)
    return Gaps.of(stream.between(began_s, began_s + seconds))


async def arrivals(
    client: httpx.AsyncClient, prompt: list[int], salts: Any, options: argparse.Namespace
) -> list[float]:
    """Send prompts in an open loop, whether or not the last one was answered, and return their TTFTs."""
    calls = []
    for _ in range(int(options.seconds / options.period)):
        calls.append(asyncio.create_task(first_token_s(client, prompt, next(salts))))
        await asyncio.sleep(options.period)
    return await asyncio.gather(*calls)


async def prefill_tokens(client: httpx.AsyncClient) -> dict[str, int]:
    """Return the prompt tokens that pairs and prefill replicas have read so far."""
    text = (await client.get("/metrics")).text
    sums = {"remote": 0.0, "local": 0.0}
    for family in text_string_to_metric_families(text):
        for where in sums:
            if family.name == f"outrider_prefill_{where}_tokens":
                sums[where] += sum(sample.value for sample in family.samples)
    return {where: int(value) for where, value in sums.items()}


def long_prompt(model: Path, num_tokens: int) -> list[int]:
    """Held-out code, end to end until it is long enough."""
    pieces = held_out_prompts(model, 16, 256)
    tokens = [token_id for piece in pieces for token_id in piece]
    return (tokens * (1 + num_tokens // len(tokens)))[:num_tokens]


def deploy_yaml(options: argparse.Namespace, num_prefills: int) -> Path:
    """Return the bundled deployment on other ports, with so many prefill replicas."""
    deployment = yaml.safe_load(Path("deploy.yaml").read_text())
    deployment["http_options"]["port"] = HTTP_PORT
    deployment["grpc_options"]["port"] = GRPC_PORT
    arguments = deployment["applications"][0]["args"]
    arguments["prefill"] = {"num_replicas": num_prefills, "chunk_tokens": options.chunk_tokens}
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"prefill_apart_{num_prefills}.yaml"
    path.write_text(yaml.safe_dump(deployment))
    return path


def main() -> None:
    """Measure with and without prefill replicas in turn and print the gaps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--period", type=float, default=4.0, help="seconds between arrivals")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--chunk-tokens", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--prefills", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--model", default="models/demo/target")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    rows = []
    for _ in range(options.rounds):
        for num_prefills in options.prefills:
            application = ServedApplication(deploy_yaml(options, num_prefills), URL)
            try:
                application.wait_until_ready()
                rows.append(asyncio.run(measure(options, num_prefills)))
            finally:
                application.close()
            print(describe(rows[-1]), flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in rows]) + "\n")
    if options.plot:
        plot_gaps(gaps_by_label(rows), f"a stream beside prompts of {options.prompt_tokens} tokens", options.plot)


def gaps_by_label(rows: list[Row]) -> dict[str, list[float]]:
    """Return all rounds of a deployment together, with prompts arriving; and of the first one, without."""
    gaps: dict[str, list[float]] = {"no prompts arrive": []}
    for row in rows:
        if row.num_prefills == rows[0].num_prefills:
            gaps["no prompts arrive"] += row.quiet.all_ms
        gaps.setdefault(f"{row.num_prefills} prefill replicas", []).extend(row.loaded.all_ms)
    return gaps


def describe(row: Row) -> str:
    """Return a row as one line of text."""
    return (
        f"{row.num_prefills} prefill replicas: quiet p50 {row.quiet.p50_ms} p99 {row.quiet.p99_ms} ms; "
        f"with prompts p50 {row.loaded.p50_ms} p99 {row.loaded.p99_ms} max {row.loaded.max_ms} ms "
        f"({row.loaded.p99_ms / row.quiet.p99_ms:.2f} x quiet p99); TTFT of {row.num_prompts} prompts "
        f"{row.prompt_ttft_mean_s} s; {row.num_remote_tokens} tokens read remotely, {row.num_local_tokens} here"
    )


if __name__ == "__main__":
    main()
