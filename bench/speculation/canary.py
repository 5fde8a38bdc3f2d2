"""Error rates of the trial of a new draft, on simulated blocks: drafts kept and rolled back by mistake, and its length.

    python -m bench.speculation.canary

Each block's goodput has noise of its own, and the traffic's level wanders from block to block and jumps now and then,
as when long answers follow short ones. A gain of 0 or less must not be kept, one of `--min-gain` or more not be rolled
back. Gaussian noise is what the test assumes; Student's with 3 degrees of freedom, jumps and noise that is alike from
block to block are what it does not.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean

from engine.accounting.goodput_trial import GoodputTrial, Verdict

_JUMP_CHANCE = 0.05  # per block
_JUMP = 0.3  # of the logarithm of goodput
_LIKENESS = 0.7  # of a block's noise with the one before
_FREEDOM = 3


@dataclass(frozen=True, slots=True)
class Rates:
    """Shares of the runs, and the mean number of pairs until the verdict."""

    kept: float
    rolled_back: float
    num_pairs: float


Noise = Callable[[random.Random, float], Iterator[float]]


def gaussian(rng: random.Random, spread: float) -> Iterator[float]:
    """Yield independent noise per block."""
    while True:
        yield rng.gauss(0.0, spread)


def heavy(rng: random.Random, spread: float) -> Iterator[float]:
    """Yield Student's noise, now and then far out."""
    scale = spread / math.sqrt(_FREEDOM / (_FREEDOM - 2))
    while True:
        squares = sum(rng.gauss(0.0, 1.0) ** 2 for _ in range(_FREEDOM))
        yield scale * rng.gauss(0.0, 1.0) / math.sqrt(squares / _FREEDOM)


def jumping(rng: random.Random, spread: float) -> Iterator[float]:
    """Yield noise about a level that jumps."""
    level = 0.0
    while True:
        if rng.random() < _JUMP_CHANCE:
            level = rng.gauss(0.0, _JUMP)
        yield level + rng.gauss(0.0, spread)


def alike(rng: random.Random, spread: float) -> Iterator[float]:
    """Yield noise that is much as it was in the block before, about a level that drifts."""
    past, level = 0.0, 0.0
    while True:
        past = _LIKENESS * past + math.sqrt(1 - _LIKENESS**2) * rng.gauss(0.0, spread)
        level += 0.01
        yield level + past


NOISES: dict[str, Noise] = {"gaussian": gaussian, "heavy tails": heavy, "jumps": jumping, "alike": alike}


def log_ratios(rng: random.Random, noise: Iterator[float], gain: float) -> Iterator[float]:
    """Yield the log ratio of each pair of blocks, one with each draft, in random order, as a canary runs them."""
    while True:
        first, second = next(noise), next(noise)
        yield math.log1p(gain) + (first - second if rng.random() < 0.5 else second - first)


def run(trial: GoodputTrial, ratios: Iterator[float]) -> tuple[Verdict, int]:
    """Return the verdict, and after how many pairs it came."""
    seen: list[float] = []
    while (verdict := trial.verdict(seen)) is Verdict.OPEN:
        seen.append(next(ratios))
    return verdict, len(seen)


def rates(trial: GoodputTrial, noise: Noise, spread: float, gain: float, num_runs: int, seed: int = 0) -> Rates:
    """Return the rates of `num_runs` trials of a draft with this gain; `spread` is of a block's log goodput."""
    results = []
    for index in range(num_runs):
        rng = random.Random(f"{seed} {index}")
        results.append(run(trial, log_ratios(rng, noise(rng, spread), gain)))
    kept = sum(verdict is Verdict.KEEP for verdict, _ in results) / num_runs
    return Rates(kept, 1 - kept, fmean(number for _, number in results))


def main() -> None:
    """Print a line per noise, spread and gain."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--min-gain", type=float, default=0.05)
    parser.add_argument("--false-keep", type=float, default=0.05)
    parser.add_argument("--false-rollback", type=float, default=0.05)
    parser.add_argument("--max-pairs", type=int, default=60)
    args = parser.parse_args()
    trial = GoodputTrial(args.min_gain, args.false_keep, args.false_rollback, args.max_pairs)
    print(f"{trial}, {args.runs} runs each")
    print(f"{'noise':12}{'spread':>8}{'gain':>8}{'kept':>8}{'rolled back':>13}{'pairs':>8}")
    for name, noise in NOISES.items():
        for spread in (0.02, 0.05, 0.1):
            for gain in (-0.1, 0.0, args.min_gain, 0.1, 0.25):
                found = rates(trial, noise, spread, gain, args.runs)
                print(
                    f"{name:12}{spread:8.2f}{gain:+8.0%}{found.kept:8.1%}{found.rolled_back:13.1%}"
                    f"{found.num_pairs:8.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
