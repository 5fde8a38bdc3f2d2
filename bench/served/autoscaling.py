"""Pairs that follow their work: one, up to `--max-pairs` under load, and one again, without a failed or changed text.

    python -m bench.served.autoscaling --users 8 --itl-ms 3 --max-pairs 3

First each prompt is answered alone, by one pair. Then users ask for the same texts, each one after the other, until all
pairs run and for `--seconds` more; then one user alone goes on, with pauses, until one pair is left. Each text is
compared with the first. The seconds of pairs are what a cloud would bill, against `--max-pairs` all the time.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from bench.contenders.prompts import held_out_prompts
from bench.served.application import ServedApplication

HTTP_PORT = 8130
GRPC_PORT = 9130
FOLDER = Path(".cache/bench")
URL = f"http://127.0.0.1:{HTTP_PORT}"
_POLL_S = 0.5
_PAUSE_S = 3.0  # of the user that is left
_TIMEOUT_S = 240.0  # of each way, up and down


@dataclass(slots=True)
class Texts:
    """Prompts that were asked, and the answers that were not as the first."""

    expected: list[list[int]]
    num_answers: int = 0
    wrong: list[str] = field(default_factory=list)

    def check(self, number: int, token_ids: list[int]) -> None:
        """Count an answer to prompt `number`."""
        self.num_answers += 1
        if token_ids != self.expected[number]:
            self.wrong.append(f"prompt {number}: another text")


@dataclass(slots=True)
class Timeline:
    """The number of pairs over time, as `/metrics` shows it."""

    began_s: float = field(default_factory=time.perf_counter)
    changes: list[tuple[float, int]] = field(default_factory=list)

    @property
    def num_pairs(self) -> int:
        return self.changes[-1][1] if self.changes else 0

    def note(self, num_pairs: int) -> None:
        """Take a reading, and print it if it is another than the last."""
        if num_pairs and num_pairs != self.num_pairs:
            self.changes.append((time.perf_counter() - self.began_s, num_pairs))
            print(f"{self.changes[-1][0]:6.1f} s: {num_pairs} pair{'s' * (num_pairs > 1)}", flush=True)

    def pair_seconds(self, end_s: float) -> float:
        """Return the seconds of all pairs up to `end_s` seconds after the start."""
        starts = [at_s for at_s, _ in self.changes]
        ends = [*starts[1:], end_s]
        return sum(number * (end - start) for (start, number), end in zip(self.changes, ends, strict=True))


async def answer(client: httpx.AsyncClient, prompt: list[int], number: int, num_tokens: int) -> list[int]:
    """Return the token ids that answer a prompt; the seed is the prompt's number."""
    body = {"prompt": prompt, "max_tokens": num_tokens, "seed": number, "temperature": 1.0, "return_token_ids": True}
    reply = await client.post("/v1/completions", json={"model": "outrider-demo", "ignore_eos": True, **body})
    reply.raise_for_status()
    token_ids: list[int] = reply.json()["choices"][0]["token_ids"]
    return token_ids


async def watch(client: httpx.AsyncClient, timeline: Timeline) -> None:
    """Read the number of pairs until cancelled."""
    while True:
        text = (await client.get("/metrics")).text
        families = (each for each in text_string_to_metric_families(text) if each.name == "outrider_kv_cache_usage")
        timeline.note(len({sample.labels["replica"] for family in families for sample in family.samples}))
        await asyncio.sleep(_POLL_S)


@asynccontextmanager
async def in_background(*work: Awaitable[None]) -> Any:
    """Run coroutines until the end of the block; an error of one is raised there."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        yield
        for task in tasks:
            if task.done():
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(is_so: Callable[[], bool]) -> bool:
    """Wait until a condition holds, at most `_TIMEOUT_S`, and return it."""
    deadline = time.perf_counter() + _TIMEOUT_S
    while not is_so() and time.perf_counter() < deadline:  # noqa: ASYNC110  # the reading of a server
        await asyncio.sleep(_POLL_S)
    return is_so()


async def measure(options: argparse.Namespace) -> bool:
    """Drive the load, print the outcome, and return True if pairs went up and down and each text was the same."""
    prompts = held_out_prompts(Path(options.model), options.prompts)
    async with httpx.AsyncClient(base_url=URL, timeout=300.0) as client:
        texts = Texts([await answer(client, prompt, number, options.tokens) for number, prompt in enumerate(prompts)])
        timeline, numbers, is_calm = Timeline(), count(), asyncio.Event()

        async def user(is_patient: bool) -> None:
            while is_patient or not is_calm.is_set():
                await asyncio.sleep(_PAUSE_S if is_calm.is_set() else 0)
                number = next(numbers) % len(prompts)
                try:
                    texts.check(number, await answer(client, prompts[number], number, options.tokens))
                except httpx.HTTPError as error:
                    texts.wrong.append(f"prompt {number}: {error!r}")

        users = [user(is_patient=not index) for index in range(options.users)]
        async with in_background(watch(client, timeline), *users):
            is_up = await until(lambda: timeline.num_pairs == options.max_pairs)
            await asyncio.sleep(options.seconds)
            is_calm.set()
            print(f"{time.perf_counter() - timeline.began_s:6.1f} s: one user left", flush=True)
            is_down = await until(lambda: timeline.num_pairs == 1)
            elapsed_s = time.perf_counter() - timeline.began_s
    spent_s, fixed_s = timeline.pair_seconds(elapsed_s), options.max_pairs * elapsed_s
    print(
        f"{texts.num_answers} texts of {options.tokens} tokens, {len(texts.wrong)} failed or changed; "
        f"{spent_s:.0f} seconds of pairs, where {options.max_pairs} all the time take {fixed_s:.0f} "
        f"({1 - spent_s / fixed_s:.0%} less)"
    )
    if options.price:
        print(f"at {options.price:g} per pair and hour: {spent_s / 3600 * options.price:.4f} for {elapsed_s:.0f} s")
    for each in texts.wrong[:5]:
        print(each)
    return is_up and is_down and not texts.wrong


def deploy_yaml(options: argparse.Namespace) -> Path:
    """Return the bundled deployment on other ports, with pairs that follow their work."""
    deployment = yaml.safe_load(Path("deploy.yaml").read_text(encoding="utf-8"))
    deployment["http_options"]["port"] = HTTP_PORT
    deployment["grpc_options"]["port"] = GRPC_PORT
    arguments = deployment["applications"][0]["args"]
    arguments["cache"] = {"memory_gib": 0.25}
    arguments["pair"] = {
        "autoscaling": {
            "min_replicas": 1,
            "max_replicas": options.max_pairs,
            "itl_ms": options.itl_ms,
            "look_back_period_s": options.delay,
            "upscale_delay_s": options.delay,
            "downscale_delay_s": options.down_delay,
        }
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / "autoscaling.yaml"
    path.write_text(yaml.safe_dump(deployment), encoding="utf-8")
    return path


def main() -> None:
    """Serve, drive the load, and end with 1 if pairs did not follow or a text failed or changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=8)
    parser.add_argument("--max-pairs", type=int, default=3)
    parser.add_argument("--itl-ms", type=float, default=3.0, help="time of a token at which a pair counts as full")
    parser.add_argument("--delay", type=float, default=4.0, help="seconds of look-back, and before there are more")
    parser.add_argument("--down-delay", type=float, default=20.0, help="before there are less; longer than a start")
    parser.add_argument("--seconds", type=float, default=10.0, help="of full load with all pairs")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--price", type=float, help="of a pair for an hour, in any currency")
    parser.add_argument("--model", default="models/demo/target")
    options = parser.parse_args()
    logging.getLogger("httpx").setLevel(logging.WARNING)
    application = ServedApplication(deploy_yaml(options), URL)
    try:
        application.wait_until_ready()
        is_fine = asyncio.run(measure(options))
    finally:
        application.close()
    sys.exit(not is_fine)


if __name__ == "__main__":
    main()
