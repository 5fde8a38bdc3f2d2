"""Systems in turn, round after round, one alive at a time, so that each has the machine to itself."""

from __future__ import annotations

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from bench.contenders.contender import Prompts, Run
from bench.peers.system import Mode, System

WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of a system."""

    system: str
    mode: Mode
    num_streams: int
    run: Run


@dataclass(slots=True)
class Outcome:
    """All results.

    `peaks` are the most bytes of each system's processes, by mode and name of process; `failures` are the reasons for a
    system's absence from a round.
    """

    measurements: list[Measurement] = field(default_factory=list)
    peaks: dict[tuple[str, Mode], dict[str, int]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    num_rounds: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Every system at every number of streams, at most `num_rounds` times.

    A further round begins only if, taking as long as the one before, it would end within `max_s`.
    """

    streams: Seq[int]
    num_tokens: int
    num_rounds: int
    max_s: float


def hold(systems: Seq[System], prompts: Prompts, plan: Plan) -> Outcome:
    """Run the rounds; a system that fails is left out from then on, and the others go on."""
    outcome = Outcome()
    began = time.monotonic()
    while outcome.num_rounds < plan.num_rounds:
        round_began = time.monotonic()
        for system in systems:
            if system.name not in outcome.failures:
                _attempt(system, prompts, plan, outcome)
        outcome.num_rounds += 1
        now = time.monotonic()
        if now - began + (now - round_began) > plan.max_s:
            break
    return outcome


def _attempt(system: System, prompts: Prompts, plan: Plan, outcome: Outcome) -> None:
    began = time.monotonic()
    try:
        try:
            _measure(system, prompts, plan, outcome)
        finally:
            system.close()
    except Exception as error:  # one peer's trouble, of whatever kind, is a line of the page and not the end of the run
        outcome.failures[system.name] = f"{type(error).__name__}: {error}"
    print(f"round {outcome.num_rounds + 1}: {system.name} took {time.monotonic() - began:.0f} s", flush=True)


def _measure(system: System, prompts: Prompts, plan: Plan, outcome: Outcome) -> None:
    contenders = system.start()
    for contender in contenders.values():
        for num_streams in {1, max(plan.streams)}:
            contender.run(prompts[:num_streams], WARM_UP_TOKENS)
    for num_streams in plan.streams:
        for mode, contender in contenders.items():
            run = contender.run(prompts[:num_streams], plan.num_tokens)
            _check(run, num_streams, plan.num_tokens)
            outcome.measurements.append(Measurement(system.name, mode, num_streams, run))
            print(f"  {system.name}, {mode}, {num_streams} streams: {run.tokens_per_second:.1f} tokens/s", flush=True)
    peaks = system.peak_bytes()
    outcome.peaks |= {(system.name, mode): peaks for mode in contenders}


def _check(run: Run, num_streams: int, num_tokens: int) -> None:
    """Raises RuntimeError for a contender that did not do the work it was asked for."""
    lengths = [len(output) for output in run.outputs]
    if lengths != [num_tokens] * num_streams:
        raise RuntimeError(f"{num_streams} answers of {num_tokens} tokens were asked for; their lengths are {lengths}")
