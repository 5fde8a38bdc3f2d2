"""Contenders in turn, round after round, so that the machine's drift is the same for all."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from bench.contenders.contender import Contender, Prompts, Run


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One run of a contender."""

    contender: str
    num_streams: int
    run: Run


def race(
    contenders: Seq[Contender], prompts: Prompts, streams: Seq[int], num_tokens: int, num_rounds: int
) -> list[TimedRun]:
    """Run every contender at every number of streams, `num_rounds` times, after a warm-up that is not counted."""
    runs = []
    for round_index in range(num_rounds + 1):
        for num_streams in streams:
            for contender in contenders:
                run = contender.run(prompts[:num_streams], num_tokens)
                if round_index > 0:
                    runs.append(TimedRun(contender.name, num_streams, run))
    return runs
