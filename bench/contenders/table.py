"""The table of a race: medians over the rounds, ratios to the first contender, and where an engine's step time went."""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import groupby

from bench.contenders.contender import ChannelTimes, Run
from bench.contenders.race import TimedRun
from engine.accounting.step_times import StepTimes

PARTS = ("schedule", "draft", "forward", "sample", "commit")


@dataclass(frozen=True, slots=True)
class Row:
    """One contender at one number of streams.

    `ratio` is against the first contender at the same number of streams, round by round, its median. `equal_share` is
    the share of tokens that are the first contender's too: bfloat16 rounds differently for different numbers of rows.
    """

    name: str
    num_streams: int
    tokens_per_second: float
    lowest: float
    highest: float
    ratio: float
    tokens_per_pass: float | None
    equal_share: float


def rows_of(runs: Seq[TimedRun]) -> list[Row]:
    """Return one row per contender and number of streams, streams first."""
    return [
        _row(name, num_streams, members, _runs_of_first(runs, num_streams))
        for (num_streams, name), members in _groups(runs)
    ]


def _groups(runs: Seq[TimedRun]) -> list[tuple[tuple[int, str], list[Run]]]:
    names = list(dict.fromkeys(timed.contender for timed in runs))

    def key(timed: TimedRun) -> tuple[int, int]:
        return timed.num_streams, names.index(timed.contender)

    grouped = groupby(sorted(runs, key=key), key=key)
    return [((streams, names[index]), [timed.run for timed in members]) for (streams, index), members in grouped]


def _runs_of_first(runs: Seq[TimedRun], num_streams: int) -> list[Run]:
    first = runs[0].contender
    return [timed.run for timed in runs if timed.contender == first and timed.num_streams == num_streams]


def _row(name: str, num_streams: int, runs: Seq[Run], reference: Seq[Run]) -> Row:
    speeds = [run.tokens_per_second for run in runs]
    ratios = [run.tokens_per_second / other.tokens_per_second for run, other in zip(runs, reference, strict=True)]
    return Row(
        name,
        num_streams,
        statistics.median(speeds),
        min(speeds),
        max(speeds),
        statistics.median(ratios),
        runs[0].tokens_per_pass,
        equal_share(runs[0], reference[0]),
    )


def equal_share(run: Run, reference: Run) -> float:
    """Return the share of positions at which both have the same token."""
    pairs = [
        pair
        for ours, theirs in zip(run.outputs, reference.outputs, strict=True)
        for pair in zip(ours, theirs, strict=False)
    ]
    return sum(ours == theirs for ours, theirs in pairs) / max(1, len(pairs))


def print_rows(rows: Seq[Row]) -> None:
    """Print the table."""
    print(f"{'':26} streams   tok/s (min-max)        ratio   tokens/pass   same tokens")
    for row in rows:
        per_pass = f"{row.tokens_per_pass:.2f}" if row.tokens_per_pass else "-"
        print(
            f"{row.name:26} {row.num_streams:7d} {row.tokens_per_second:7.1f} ({row.lowest:5.1f}-{row.highest:5.1f})"
            f" {row.ratio:10.2f} {per_pass:>13} {row.equal_share:13.0%}"
        )


def print_step_times(runs: Seq[TimedRun]) -> None:
    """Milliseconds of a mean step, part by part, for the contenders that know them.

    `draft` is what the target waits: with the draft in this process its whole work, with a draft actor what is left of
    `drafting` and `channel` after the target's own bookkeeping. `overhead` is everything but the models' share.
    """
    columns = (*PARTS, "drafting", "channel", "overhead")
    print(f"\n{'ms per step':26} streams " + "".join(f"{column:>10}" for column in columns))
    for (num_streams, name), members in _groups(runs):
        times = sum((run.step_times for run in members if run.step_times is not None), StepTimes())
        if times.num_steps:
            channels = [run.channel_times for run in members if run.channel_times is not None]
            print(f"{name:26} {num_streams:7d} " + _split(times, channels))


def _split(times: StepTimes, channels: Seq[ChannelTimes]) -> str:
    parts = [_per_step(getattr(times, f"{part}_s"), times) for part in PARTS]
    overhead_s = times.schedule_s + times.sample_s + times.commit_s
    if not channels:
        return "".join(parts) + f"{'-':>10}{'-':>10}{overhead_s / times.total_s:10.1%}"
    drafting_s = sum(channel.drafting_s for channel in channels)
    channel_s = sum(channel.channel_s for channel in channels)
    overhead_s += max(0.0, times.draft_s - drafting_s)
    split = [*parts, _per_step(drafting_s, times), _per_step(channel_s, times)]
    return "".join(split) + f"{overhead_s / times.total_s:10.1%}"


def _per_step(seconds: float, times: StepTimes) -> str:
    return f"{1e3 * seconds / times.num_steps:10.2f}"
