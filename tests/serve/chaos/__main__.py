"""`make chaos`: kills, stops and other faults in every process of a served demo, under seeded streams.

    python -m tests.serve.chaos --only target "clock" --soak 10

Two pairs, a prefill replica and two ingress replicas serve the demo on this machine, while six seeded streams repeat
with prompts that no cache holds. The promises for each fault: no text changes, and no token is lost or doubled. Only a
stream whose connection was open at the fault and closed with it may fail; its tokens so far are right, and the next
stream has the whole text. A fault ends when no process has started or ended for 90 seconds and one HAProxy runs.
Then memory, blocks, actors, handles and threads stay constant for `--soak` minutes. The exit status is 1 if a promise
is broken.
"""

from __future__ import annotations

import argparse
import math
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.serve.bystanders import Bystanders, Failure, Habits, Stay, total
from tests.serve.chaos.faults import FAULTS, Fault
from tests.serve.chaos.processes import ProcessUsage
from tests.serve.chaos.world import MODEL, POLL_S, Args, ChaosWorld

HABITS = Habits(num_seeds=6, num_tokens=256, num_lines=12, is_cold=True)
_HEAD = (
    "fault",
    "sent",
    "ended",
    "failed later",
    "tokens lost or doubled",
    "texts changed",
    "longest stall",
    "recovery",
    "rest",
    "promises",
)
_SOAK_HEAD = ("minute", "RSS", "blocks in use", "processes", "actors", "threads", "handles")
_WARM_S = 60.0
_END_TIMEOUT_S = 60.0
_GROWTH = 1.05


@dataclass(frozen=True, slots=True)
class FaultOutcome:
    """The streams during a fault, the seconds until everything was back, and the seconds until all was at rest."""

    fault: Fault
    stay: Stay
    recovery_s: float
    rest_s: float
    struck_s: float
    problem: str = ""

    @property
    def ended(self) -> list[Failure]:
        """The streams that the fault ended: open at the fault, or begun before anything could notice it."""
        until_s = self.struck_s + (self.fault.breaks_s or 0.0)
        return [each for each in self.stay.failures if each.sent_s <= until_s]

    @property
    def later(self) -> list[Failure]:
        """The failed streams that began later."""
        return [each for each in self.stay.failures if each not in self.ended]

    @property
    def broken(self) -> list[str]:
        """The broken promises."""
        stay = self.stay
        return [
            *([self.problem] if self.problem else []),
            *([f"{stay.num_changed} texts changed"] if stay.num_changed else []),
            *([f"{stay.num_tokens_off} tokens lost or doubled"] if stay.num_tokens_off else []),
            *([f"ended: {self.ended[0]}"] if self.ended and self.fault.breaks_s is None else []),
            *([f"failed later: {self.later[0]}"] if self.later else []),
        ]


def settings(args: Args) -> None:
    """Serve two pairs, a prefill replica for long prompts, and two ingress replicas."""
    args["target"]["num_threads"] = args["draft"]["num_threads"] = 1
    args["cache"]["memory_gib"] = 0.25
    args["pair"]["num_replicas"] = args["ingress"]["num_replicas"] = 2
    args["prefill"] = {"num_replicas": 1, "min_remote_prefill_tokens": 64}


class Chaos:
    """A served application and its bystanders' streams."""

    def __init__(self, world: ChaosWorld) -> None:
        self._world = world
        self._bystanders = Bystanders(world.base_url, MODEL, HABITS)

    def inject(self, fault: Fault) -> FaultOutcome:
        """Inject a fault, and wait until all is back."""
        self._bystanders.report()
        began_s = self._world.struck_s = time.monotonic()
        problem, stay = "", None
        try:
            fault.act(self._world)
            if fault.is_final:
                stay = self._restart()
        except TimeoutError as error:
            problem = str(error)
        recovery_s = time.monotonic() - began_s
        if not fault.is_final:
            problem = problem or self._rest()
        rest_s = time.monotonic() - began_s
        stay = stay or self._stay_to_the_end()
        if fault.has_other_texts:
            stay = self._compared_with_new_model(stay)
        return FaultOutcome(fault, stay, recovery_s, rest_s, self._world.struck_s, problem)

    def _rest(self) -> str:
        """Wait until the application is at rest; return the problem if it never is."""
        try:
            self._world.await_rest()
        except TimeoutError as error:
            return str(error)
        return ""

    def _stay_to_the_end(self) -> Stay:
        """Return the streams' outcome, including streams that still ran when all was back."""
        stays = [self._bystanders.report()]
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        num_later = 0
        while num_later < 2 * HABITS.num_seeds and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            stays.append(self._bystanders.report())
            num_later += stays[-1].num_streams
        return total(stays)

    def _restart(self) -> Stay:
        stay, texts = self._bystanders.report(), self._bystanders.texts
        self.close()
        self._world.restart()
        self._bystanders = Bystanders(self._world.base_url, MODEL, HABITS)
        return stay if self._bystanders.texts == texts else replace(stay, num_changed=HABITS.num_seeds)

    def _compared_with_new_model(self, stay: Stay) -> Stay:
        """Stream the new model's texts; count a text as changed if neither the old nor the new model wrote it."""
        self.close()
        self._bystanders = Bystanders(self._world.base_url, MODEL, HABITS)
        texts = self._bystanders.texts
        mixed = [text for seed, text in stay.strange if not texts[seed].startswith(text)]
        return replace(stay, num_changed=len(mixed))

    def close(self) -> None:
        """End the streams."""
        self._bystanders.close()


def soak(world: ChaosWorld, minutes: float) -> bool:
    """Stream for `minutes`, print the usage once a minute, and return whether it stayed constant after the warm-up."""
    with Bystanders(world.base_url, MODEL, HABITS) as bystanders:
        time.sleep(_WARM_S)
        first = last = world.processes.usage()
        bystanders.report()
        began_s = time.monotonic()
        print(f"\n| {' | '.join(_SOAK_HEAD)} |\n|{'---|' * len(_SOAK_HEAD)}", flush=True)
        _print_usage(0.0, first, world)
        for minute in range(1, math.ceil(minutes) + 1):
            until_s = 60 * min(minute, minutes)
            time.sleep(max(0.0, began_s + until_s - time.monotonic()))
            last = world.processes.usage()
            _print_usage(until_s / 60, last, world)
        stay = bystanders.report()
    time.sleep(2.0)
    used = _used_blocks(world)
    print(
        f"\n{stay.num_streams} streams, {stay.num_changed} changed, {len(stay.failures)} failed; {used:.0f} blocks "
        f"held by none; grown most: {_growth(first, last)}"
    )
    return not (stay.num_changed or stay.failures or used) and _is_flat(first, last)


def _print_usage(minute: float, usage: ProcessUsage, world: ChaosWorld) -> None:
    print(
        f"| {minute:g} | {usage.num_bytes / 2**20:.0f} MiB | {_used_blocks(world):.0f} | {usage.num_processes} | "
        f"{usage.num_actors} | {usage.num_threads} | {usage.num_handles} |",
        flush=True,
    )


def _growth(first: ProcessUsage, last: ProcessUsage) -> str:
    """Return the five processes whose memory has grown most."""
    grown = Counter({key: now - first.bytes_by_process.get(key, 0) for key, now in last.bytes_by_process.items()})
    return ", ".join(f"{kind} {num_bytes / 2**20:+.0f} MiB" for (_, kind), num_bytes in grown.most_common(5))


def _is_flat(first: ProcessUsage, last: ProcessUsage) -> bool:
    pairs = (
        (first.num_bytes, last.num_bytes),
        (first.num_processes, last.num_processes),
        (first.num_actors, last.num_actors),
        (first.num_threads, last.num_threads),
        (first.num_handles, last.num_handles),
    )
    return all(now <= _GROWTH * before for before, now in pairs)


def _used_blocks(world: ChaosWorld) -> float:
    text = httpx.get(f"{world.base_url}/metrics", timeout=30.0).text
    families = text_string_to_metric_families(text)
    return sum(s.value for each in families if each.name == "outrider_kv_cache_used_blocks" for s in each.samples)


def report(outcome: FaultOutcome) -> None:
    """Print a row of the table."""
    stay = outcome.stay
    verdict = "; ".join(outcome.broken) or "kept"
    refused = f", {stay.num_refused} refused" if stay.num_refused else ""
    for kind, failures in (("ended", outcome.ended), ("failed later", outcome.later)):
        for failure in failures:
            print(f"{kind}, sent {failure.sent_s - outcome.struck_s:+.1f} s: {failure}", file=sys.stderr, flush=True)
    again = f", again after {stay.longest_outage_s:.1f} s" if stay.failures else ""
    print(
        f"| {outcome.fault.name} | {stay.num_streams}{refused} | {len(outcome.ended)}{again} | {len(outcome.later)} | "
        f"{stay.num_tokens_off} | {stay.num_changed} | {stay.longest_stall_s:.1f} s | {outcome.recovery_s:.1f} s | "
        f"{outcome.rest_s:.0f} s | {verdict} |",
        flush=True,
    )


def run(world: ChaosWorld, faults: list[Fault]) -> bool:
    """Inject the faults in turn and print the table; return whether every promise was kept."""
    print(f"| {' | '.join(_HEAD)} |\n|{'---|' * len(_HEAD)}", flush=True)
    is_kept = True
    chaos = Chaos(world)
    try:
        for fault in faults:
            outcome = chaos.inject(fault)
            report(outcome)
            is_kept &= not outcome.broken
    finally:
        chaos.close()
    return is_kept


def main() -> None:
    """Serve the demo, inject faults, soak, print the tables."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # so that child processes end too
    args = _parse_args()
    faults = [each for each in FAULTS if args.only is None or any(part in each.name for part in args.only)]
    world = ChaosWorld(args.folder, settings)
    try:
        world.start()
        is_kept = run(world, faults)
        if args.soak:
            is_kept &= soak(world, args.soak)
    finally:
        world.close()
    sys.exit(not is_kept)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", metavar="PART", help="faults whose names have one of these parts; without parts no fault"
    )
    parser.add_argument("--soak", type=float, default=0.0, metavar="MINUTES", help="minutes of streams at the end")
    parser.add_argument("--folder", type=Path, default=Path(".cache/chaos"), help="for the deploy.yaml and the log")
    return parser.parse_args()


if __name__ == "__main__":
    main()
