"""The protocol of a system, a way to serve the pair, and the rounds of systems, one alive at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import psutil

from bench.contenders.contender import Contender, ContenderRun, Prompts

WARM_UP_TOKENS = 8
WARM_UP_PROMPT_TOKENS = 96
_MEMORY_PERIOD_S = 0.25
Texts = Mapping[str, Prompts]  # prompts by the kind of their text


class DraftingMode(StrEnum):
    """Plain decoding, with drafts looked up in the text so far, or with a draft model."""

    PLAIN = "plain"
    LOOKUP = "with lookup"
    DRAFT = "with draft"


class Precision(StrEnum):
    """The precision of weights; of integers, activations are as the system rounds them on this processor."""

    BF16 = "bf16"
    F32 = "f32"
    INT8 = "int8"
    INT4 = "int4"

    @property
    def is_quantized(self) -> bool:
        return self in (Precision.INT8, Precision.INT4)


@dataclass(frozen=True, slots=True)
class ModelPair:
    """Target and draft in the form that a system loads; without a draft Outrider's target drafts for itself."""

    target: Path
    draft: Path | None

    @property
    def modes(self) -> list[DraftingMode]:
        """The modes of a system that needs a draft model for `DRAFT`."""
        return [mode for mode in DraftingMode if self.draft or mode is not DraftingMode.DRAFT]


@dataclass(frozen=True, slots=True)
class SystemLimits:
    """The limits of all systems; a run that takes longer than `deadline_s` fails.

    The search for each system's best setting tries every K of `draft_lengths`.
    """

    num_threads: int
    draft_lengths: tuple[int, ...]
    max_streams: int
    max_new_tokens: int  # of one stream, drafts after the last token included
    deadline_s: float


class System(Protocol):
    """A system under test; `name` is peer and precision, `settings` are for the page.

    Modes that need processes of their own are separate systems of the same name.
    """

    name: str
    settings: str

    def start(self) -> dict[DraftingMode, dict[str, Contender]]:
        """Start the processes; return the contenders of each mode by their setting.

        Raises:
            RuntimeError: they do not get ready.
        """

    def close(self) -> None:
        """End the processes; may be called twice, and before `start`."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """One run of a system; `setting` is the fastest of `num_tried`."""

    system: str
    mode: DraftingMode
    text: str
    num_streams: int
    setting: str
    num_tried: int
    run: ContenderRun


@dataclass(frozen=True, slots=True)
class Start:
    """The seconds of one start until requests can come, and the most memory of the processes up to the first run.

    Memory is the proportional set size of all processes together, read every quarter of a second. It is None for a
    system that runs in this process.
    """

    ready_s: float
    peak_bytes: int | None


@dataclass(slots=True)
class RaceResults:
    """All runs and starts, and by system the reason for its absence from later rounds."""

    measurements: list[Measurement] = field(default_factory=list)
    starts: dict[str, list[Start]] = field(default_factory=dict)
    best: dict[tuple[str, DraftingMode, str, int], str] = field(default_factory=dict)  # settings, searched once
    failures: dict[str, str] = field(default_factory=dict)
    num_rounds: int = 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Every system at every number of streams, at most `num_rounds` times; on `plain_texts` without drafts.

    A further round begins only if, taking as long as the last one, it would end within `max_s`.
    """

    streams: Seq[int]
    num_tokens: int
    num_search_tokens: int
    num_rounds: int
    max_s: float
    plain_texts: frozenset[str] = frozenset()


def run_rounds(systems: Seq[System], texts: Texts, schedule: Schedule) -> RaceResults:
    """Run the rounds; a system that fails is left out of later rounds."""
    results = RaceResults()
    began_s = time.monotonic()
    while results.num_rounds < schedule.num_rounds:
        round_began_s = time.monotonic()
        for system in systems:
            if system.name not in results.failures:
                _attempt(system, texts, schedule, results)
        results.num_rounds += 1
        now_s = time.monotonic()
        if now_s - began_s + (now_s - round_began_s) > schedule.max_s:
            break
    return results


def _attempt(system: System, texts: Texts, schedule: Schedule, results: RaceResults) -> None:
    try:
        try:
            _measure(system, texts, schedule, results)
        finally:
            system.close()
    except Exception as error:  # any failure of one peer is a line of the page, and the others go on
        results.failures[system.name] = f"{type(error).__name__}: {error}"


def _measure(system: System, texts: Texts, schedule: Schedule, results: RaceResults) -> None:
    began_s = time.monotonic()
    with peak_memory() as peak:
        modes = system.start()
        ready_s = time.monotonic() - began_s
        shortest = min(texts.values(), key=lambda prompts: len(prompts[0]))
        next(iter(next(iter(modes.values())).values())).run(shortest[:1], WARM_UP_TOKENS)
    if DraftingMode.PLAIN in modes:
        results.starts.setdefault(system.name, []).append(Start(ready_s, max(peak) or None))
    for text, prompts in texts.items():
        for num_streams in (number for number in schedule.streams if number <= len(prompts)):
            for mode, contenders in modes.items():
                if text in schedule.plain_texts and mode is not DraftingMode.PLAIN:
                    continue
                chosen = prompts[:num_streams]
                place = (system.name, mode, text, num_streams)
                if place not in results.best:
                    results.best[place] = _fastest(contenders, chosen, schedule.num_search_tokens)
                setting = results.best[place]
                run = _run(contenders[setting], chosen, schedule.num_tokens)
                lengths = [len(output) for output in run.outputs]
                if lengths != [schedule.num_tokens] * num_streams:
                    raise RuntimeError(
                        f"{num_streams} answers of {schedule.num_tokens} tokens have the lengths {lengths}"
                    )
                results.measurements.append(Measurement(*place, setting, len(contenders), run))
                speed = f"{run.tokens_per_second:.1f} tokens/s, {setting}"
                print(f"  {system.name}, {mode}, {text}, {num_streams} streams: {speed}", flush=True)


def _fastest(contenders: Mapping[str, Contender], prompts: Prompts, num_tokens: int) -> str:
    """Return the setting with the most tokens per second."""
    if len(contenders) == 1:
        return next(iter(contenders))
    return max(contenders, key=lambda setting: _run(contenders[setting], prompts, num_tokens).tokens_per_second)


def _run(contender: Contender, prompts: Prompts, num_tokens: int) -> ContenderRun:
    """Warm up and run; a contender forgets afterwards all that it has learned from the texts."""
    contender.run([prompt[-WARM_UP_PROMPT_TOKENS:] for prompt in prompts], WARM_UP_TOKENS)
    run = contender.run(prompts, num_tokens)
    contender.close()
    return run


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Yield a list that grows by the memory of all processes that begin below this one, until the block ends."""
    seen, is_over = [0], threading.Event()
    others = set(psutil.Process().children(recursive=True))

    def watch() -> None:
        while not is_over.wait(_MEMORY_PERIOD_S):
            seen.append(_memory_below(others))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield seen
    finally:
        is_over.set()
        watcher.join()
        seen.append(_memory_below(others))


def _memory_below(others: set[psutil.Process]) -> int:
    total = 0
    for process in set(psutil.Process().children(recursive=True)) - others:
        with suppress(psutil.Error):  # it has ended
            total += process.memory_full_info().pss
    return total
