"""Contenders in turn, round after round, so that each meets the same moods of the machine."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from bench.contenders.contender import Contender, Prompts, Run


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One run and whose it was."""

    contender: str
    num_streams: int
    run: Run


def race(
    contenders: Seq[Contender], prompts: Prompts, streams: Seq[int], num_tokens: int, num_rounds: int
) -> list[TimedRun]:
    """Every contender at every number of streams, `num_rounds` times, after one warm-up round that is not counted."""
    runs = []
    for round_index in range(num_rounds + 1):
        for num_streams in streams:
            for contender in contenders:
                run = contender.run(prompts[:num_streams], num_tokens)
                if round_index > 0:
                    runs.append(TimedRun(contender.name, num_streams, run))
    return runs
