"""The best thread counts of target and draft, in turn (sync) and side by side (async), over HTTP.

    python -m bench.served.threads --target-threads 1 2 --draft-threads 1 2 --streams 1 8

Every division of a machine's cores is started, warmed up, timed and stopped, in turn, round after round: only one of
them is alive at a time. Speculative decoding of the padded fixture (or `--fixture models/demo/target --dtype float32`)
with the demo draft. The first row of a mode is what the placement chooses by itself; ratios are to it, in the same
round, their median.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from bench.contenders.http_contender import HttpContender
from bench.contenders.prompts import held_out_prompts
from bench.padded_pair import CACHE, DEMO, padded_target
from bench.served.served_pair import MODEL_ID, ServedPair, served_on


@dataclass(frozen=True, slots=True)
class Division:
    """Threads of target and draft; None: what the placement chooses."""

    mode: str
    target_threads: int | None = None
    draft_threads: int | None = None

    def __str__(self) -> str:
        threads = f"{self.target_threads} + {self.draft_threads}" if self.target_threads else "default"
        return f"{self.mode}, {threads}"


def main() -> None:
    """Measure every division in turn and print its speed against the placement's."""
    args = _parse_args()
    speeds: dict[tuple[Division, int], list[float]] = {}
    for _ in range(args.rounds):
        for division in _divisions(args):
            for num_streams, speed in _run(division, args).items():
                speeds.setdefault((division, num_streams), []).append(speed)
    print(f"{'target + draft threads':24} {'streams':>8} {'tok/s':>8} {'ratio':>7}")
    for (division, num_streams), found in speeds.items():
        base = speeds[Division(division.mode), num_streams]
        ratio = statistics.median(speed / other for speed, other in zip(found, base, strict=True))
        print(f"{division!s:24} {num_streams:8} {statistics.median(found):8.1f} {ratio:7.2f}")


def _divisions(args: argparse.Namespace) -> Iterator[Division]:
    for mode in args.modes:
        yield Division(mode)
        for target_threads, draft_threads in product(args.target_threads, args.draft_threads):
            yield Division(mode, target_threads, draft_threads)


def _run(division: Division, args: argparse.Namespace) -> dict[int, float]:
    """Tokens per second by number of streams."""
    pair = ServedPair(
        args.fixture or padded_target(),
        DEMO / "draft",
        args.dtype,
        num_threads=division.target_threads,
        num_draft_threads=division.draft_threads,
        mode=division.mode,
    )
    prompts = held_out_prompts(DEMO / "target", max(args.streams))
    with ExitStack() as stack:
        contender = HttpContender(served_on(CACHE, pair, stack), MODEL_ID, is_speculating=True)
        contender.run(prompts, args.tokens)
        return {streams: contender.run(prompts[:streams], args.tokens).tokens_per_second for streams in args.streams}


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["sync", "async"], choices=["sync", "async"])
    parser.add_argument("--target-threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--draft-threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--fixture", type=Path, help="folder of the target; the padded fixture if absent")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="prompts at once")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate for each prompt")
    parser.add_argument("--rounds", type=int, default=2, help="each division is started so many times")
    return parser.parse_args()


if __name__ == "__main__":
    main()
