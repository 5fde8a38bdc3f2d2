"""Run lengths of the drift alarm on simulated traffic: false alarms while it is steady, steps until it notices a fall.

    python -m bench.speculation.drift

Each stream carries one text at a time, of its own difficulty, so that passes of one text fare alike (overdispersion):
the chance of a first draft is drawn from a beta distribution per text.
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import numpy as np

from engine.accounting.drift import DriftDetector

STEADY_STEPS = 20_000
CODE, PROSE = 0.75, 0.45  # acceptance of the first draft, before and after the traffic changes
LITTLE = 0.63  # after a small change
_SOON, _LATE = 1000, 5000  # steps in which a fall should be noticed
NUM_RUNS = 10


def passes(
    rng: np.random.Generator, num_steps: int, num_streams: int, mean: float, concentration: float, text_steps: int
) -> Iterator[tuple[int, int]]:
    """Yield, per step, the passes with drafts and those whose first draft stood."""
    shape = mean * concentration, (1 - mean) * concentration
    chances = rng.beta(*shape, num_streams)
    left = rng.integers(1, 2 * text_steps, num_streams)
    for _ in range(num_steps):
        left -= 1
        ended = left <= 0
        chances[ended] = rng.beta(*shape, ended.sum())
        left[ended] = rng.integers(1, 2 * text_steps, ended.sum())
        yield num_streams, int((rng.random(num_streams) < chances).sum())


def run(
    seed: int, num_streams: int, concentration: float, text_steps: int, fallen_to: float = PROSE
) -> tuple[int, int | None]:
    """Return the false alarms of a steady run, and the steps until the fall behind it is noticed."""
    rng = np.random.default_rng(seed)
    detector = DriftDetector()
    steady = passes(rng, STEADY_STEPS, num_streams, CODE, concentration, text_steps)
    num_false = sum([detector.observe(*each) for each in steady])
    num_steps = _SOON if fallen_to == PROSE else _LATE
    fallen = passes(rng, num_steps, num_streams, fallen_to, concentration, text_steps)
    return num_false, next((step for step, each in enumerate(fallen, 1) if detector.observe(*each)), None)


def main() -> None:
    """Print one line per kind of traffic."""
    print(f"acceptance {CODE} -> {PROSE} or {LITTLE}, {NUM_RUNS} runs of {STEADY_STEPS} steady steps each")
    for num_streams in (2, 4, 16, 64):
        for concentration, text_steps in ((20.0, 100), (8.0, 150)):
            noticed, num_false = [], 0
            for fallen_to, limit in ((PROSE, _SOON), (LITTLE, _LATE)):
                results = [run(seed, num_streams, concentration, text_steps, fallen_to) for seed in range(NUM_RUNS)]
                steps = sorted(limit + 1 if each is None else each for _, each in results)
                num_false = sum(number for number, _ in results)
                noticed.append(f"{median(steps):g} steps (worst {steps[-1]})")
            print(
                f"{num_streams:3} streams, beta({concentration:g}), texts of {text_steps} steps: {num_false} false "
                f"alarms, noticed after {noticed[0]}, the small one after {noticed[1]}",
                flush=True,
            )


if __name__ == "__main__":
    main()
