"""`make overload`: 5 and 100 times the load that a served demo can take, of two tenants with weights 3 and 1.

    python -m tests.serve.chaos.overload --times 5 100 --seconds 90

Requests have one, two or four choices of 64 to 192 tokens, and arrive at a steady rate whatever happens to earlier
ones. The promises: goodput (tokens of answered requests per second) stays within 10% of the goodput at a load that just
fills the pairs, each request is answered or refused, 99 of 100 refusals take less than 50 ms, and while both tenants
ask for more than the capacity, each gets its weight's part of the tokens within 10%. The clients compute on the same
cores; "without clients" is goodput relative to the capacity that they leave. It is for information only.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.serve.chaos.load_client import OK, REFUSED, LoadAnswer, LoadClient
from tests.serve.chaos.world import MODEL, Args, ChaosWorld

WEIGHTS = {"heavy": 3, "light": 1}
_HEAD = (
    "load",
    "requests/s",
    "answered",
    "refused",
    "by HAProxy",
    "other",
    "tokens/s",
    "without clients",
    "refusal p50",
    "p99",
    "heavy has",
    "client's CPU",
    "verdict",
)
_NUM_CLOSED = 16  # requests at once of the load that just fills the pairs
_PAUSE_S = 0.5  # of one such request after a refusal
_TICK_S = 0.01  # requests due within one tick are sent at once
_MARGIN = 0.1
_MAX_REFUSAL_S = 0.05
_WARM = 0.35  # this part of a run does not count


@dataclass(frozen=True, slots=True)
class OverloadRun:
    """A run: the requests sent at `times` the capacity, and their answers."""

    times: float
    rate: float
    began_s: float
    ended_s: float
    answers: tuple[LoadAnswer, ...]
    cpu_s: float

    @property
    def statuses(self) -> Counter[int]:
        return Counter(answer.status for answer in self.answers)

    def tokens_per_second(self, tenants: Sequence[str] = tuple(WEIGHTS)) -> float:
        """Return the tokens per second of requests that were answered between warm-up and end."""
        from_s = self.began_s + _WARM * (self.ended_s - self.began_s)
        counted = (a for a in self.answers if a.tenant in tenants and from_s <= a.ended_s < self.ended_s)
        return sum(answer.num_tokens for answer in counted) / (self.ended_s - from_s)

    @property
    def requests_per_second(self) -> float:
        return self.statuses[OK] / (self.ended_s - self.began_s)

    @property
    def client_cpu(self) -> float:
        """The part of a core that the clients took."""
        return self.cpu_s / (self.ended_s - self.began_s)

    def refusal_s(self, percentile: float) -> float:
        """Return a percentile of the time that a refusal took."""
        times = [a.ended_s - a.sent_s for a in self.answers if a.status == REFUSED]
        return float(np.percentile(times, percentile)) if times else 0.0

    @property
    def heavy_share(self) -> float:
        return self.tokens_per_second(["heavy"]) / max(self.tokens_per_second(), 1e-9)

    def ratio_without_clients(self, capacity: OverloadRun) -> float:
        """Return goodput over `capacity`'s goodput, less the part of the cores that the extra clients took."""
        left = 1 - (self.client_cpu - capacity.client_cpu) / len(os.sched_getaffinity(0))
        return self.tokens_per_second() / (capacity.tokens_per_second() * left)

    def broken(self, capacity: OverloadRun) -> list[str]:
        """The broken promises."""
        ratio = self.tokens_per_second() / capacity.tokens_per_second()
        fair = WEIGHTS["heavy"] / sum(WEIGHTS.values())
        strange = {status: number for status, number in self.statuses.items() if status not in (OK, REFUSED)}
        return [
            *([f"goodput {ratio:.0%}"] if ratio < 1 - _MARGIN else []),
            *([f"answers {strange}"] if strange else []),
            *([f"refusals {1000 * self.refusal_s(99):.0f} ms"] if self.refusal_s(99) > _MAX_REFUSAL_S else []),
            *([f"heavy has {self.heavy_share:.0%}"] if abs(self.heavy_share / fair - 1) > _MARGIN else []),
        ]


async def closed_load(client: LoadClient, seconds: float) -> OverloadRun:
    """Keep so many requests running that no place is free for long, and none has to be refused."""
    answers: list[LoadAnswer] = []
    began_s, began_cpu_s = time.monotonic(), time.process_time()

    async def go_on() -> None:
        while time.monotonic() < began_s + seconds:
            answers.append(await client.request())
            if answers[-1].status == REFUSED:
                await asyncio.sleep(_PAUSE_S)

    clients = [asyncio.create_task(go_on()) for _ in range(_NUM_CLOSED)]
    await asyncio.sleep(seconds)
    await client.settle()
    await asyncio.gather(*clients)
    return OverloadRun(1.0, 0.0, began_s, began_s + seconds, tuple(answers), time.process_time() - began_cpu_s)


async def open_load(client: LoadClient, capacity: OverloadRun, times: float, seconds: float) -> OverloadRun:
    """Send requests at `times` the rate of `capacity`, then await the accepted ones."""
    rate = times * capacity.requests_per_second
    answers: list[LoadAnswer] = []
    began_s, began_cpu_s, num_sent = time.monotonic(), time.process_time(), 0
    while (now_s := time.monotonic()) < began_s + seconds:
        for _ in range(num_sent, int(rate * (now_s - began_s)) + 1):
            client.send(answers.append)
            num_sent += 1
        await asyncio.sleep(_TICK_S)
    ended_s, cpu_s = time.monotonic(), time.process_time() - began_cpu_s
    await client.settle()
    return OverloadRun(times, num_sent / (ended_s - began_s), began_s, ended_s, tuple(answers), cpu_s)


def settings(folder: Path, args: Args) -> None:
    """Serve two pairs with small queues, so that a run of seconds fills them, and the tenants' keys."""
    path = folder / "keys"
    path.write_text("".join(f"key-of-{name} tenant={name} weight={weight}\n" for name, weight in WEIGHTS.items()))
    args["target"]["num_threads"] = args["draft"]["num_threads"] = 1
    args["cache"]["memory_gib"] = 0.25
    args["scheduler"]["max_num_sequences"] = 16
    args["pair"].update(num_replicas=2, max_queued_requests=8)
    args["ingress"] = {"num_replicas": 2, "api_keys_file": str(path)}


async def measure(world: ChaosWorld, all_times: Sequence[float], seconds: float) -> bool:
    """Print a row for each load; return whether every promise was kept."""
    client = LoadClient(world.port, MODEL, tuple(WEIGHTS))
    await closed_load(client, seconds / 2)  # a warm-up: compilation and measurements
    capacity = await closed_load(client, seconds)
    print(f"| {' | '.join(_HEAD)} |\n|{'---|' * len(_HEAD)}", flush=True)
    _print(capacity, capacity, ["just full"])
    is_kept = True
    for times in all_times:
        load = await open_load(client, capacity, times, seconds)
        broken = load.broken(capacity)
        _print(load, capacity, broken or ["kept"])
        is_kept &= not broken
    return is_kept


def _print(load: OverloadRun, capacity: OverloadRun, verdict: list[str]) -> None:
    statuses = load.statuses
    num_other = statuses.total() - statuses[OK] - statuses[REFUSED]
    p50_ms, p99_ms = 1000 * load.refusal_s(50), 1000 * load.refusal_s(99)
    num_by_proxy = sum(answer.is_by_proxy for answer in load.answers)
    print(
        f"| {load.times:g}x | {load.rate or load.requests_per_second:.1f} | {statuses[OK]} | {statuses[REFUSED]} | "
        f"{num_by_proxy} | {num_other} | {load.tokens_per_second():.0f} | {load.ratio_without_clients(capacity):.0%} | "
        f"{p50_ms:.0f} ms | {p99_ms:.0f} ms | {load.heavy_share:.0%} | {load.client_cpu:.0%} | {'; '.join(verdict)} |",
        flush=True,
    )


def main() -> None:
    """Serve the demo, overload it, print the table."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that child processes end too
    args = _parse_args()
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    world = ChaosWorld(folder, lambda deploy: settings(folder, deploy))
    try:
        world.start()
        is_kept = asyncio.run(measure(world, args.times, args.seconds))
    finally:
        world.close()
    sys.exit(not is_kept)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=float, nargs="+", default=[5.0, 100.0], help="of the capacity")
    parser.add_argument("--seconds", type=float, default=90.0, help="of each load")
    parser.add_argument("--folder", type=Path, default=Path(".cache/overload"), help="for the deploy.yaml and the log")
    return parser.parse_args()


if __name__ == "__main__":
    main()
