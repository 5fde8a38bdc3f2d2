"""Replays a request trace against simulated workers, under the router's policies and their rivals.

    python -m bench.simulator TRACE --workers 8 --cache-blocks 4000 --load 0.7 --json rows.json

Prints a table, and draws it beside the rows; docs/routing.md explains its columns and what the simulation assumes.
Every run of the same command prints the same figures.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from types import ModuleType

from bench.simulator.baselines import POLICIES, SimulatedPolicy
from bench.simulator.calibration import Calibration, at_load
from bench.simulator.channel import ChannelQuality
from bench.simulator.rates import ServingRates
from bench.simulator.replay import Fleet, replay
from bench.simulator.report import ReportLine, format_table, report_line, write_json
from bench.simulator.trace import Trace
from bench.simulator.trace_file import TraceError, read_trace

DEFAULT_POLICIES = "prefix,least_work,p2c,longest_prefix,round_robin,random"
SIGNAL_AGES_S = (0.0, 0.1, 1.0)


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of every policy asked for, and of prefix routing under load signals of several ages."""

    policies: list[ReportLine]
    signal_ages: list[ReportLine]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = _parser()
    options = parser.parse_args(arguments)
    plot = _plotter(options)
    path = options.plot or (options.json and options.json.with_suffix(".png"))
    try:
        recorded = read_trace(options.trace, options.lines)
    except (TraceError, OSError) as error:
        parser.error(str(error))
    fleet = _fleet(options)
    calibration = at_load(recorded, fleet, options.load)
    trace = calibration.trace
    print(_describe(recorded, calibration, fleet))
    report = simulate(trace, fleet, options.policies)
    print(_format(report))
    if options.json:
        write_json([line.row for line in report.policies], options.json)
    if plot:
        rows = [line.row for line in (*report.policies, *report.signal_ages)]
        plot.plot_rows(rows, f"{trace.name}, {fleet.num_workers} workers, load {options.load:.0%}", path)


def _plotter(options: argparse.Namespace) -> ModuleType | None:
    """Return the plotting function, loaded before anything is simulated.

    None where nothing is to be drawn, or only rows were asked for and matplotlib is missing.
    """
    if options.plot is None and options.json is None:
        return None
    try:
        return importlib.import_module("bench.simulator.plot")
    except ImportError:
        if options.plot is not None:
            raise
        print("no plot beside the rows, for matplotlib is missing; pip install 'outrider[bench]'")
        return None


def simulate(trace: Trace, fleet: Fleet, policies: Sequence[SimulatedPolicy]) -> Report:
    """Replay `trace` once per policy; where `prefix` is among them, also once per age of the load signal."""
    lines = [report_line(policy.name, replay(trace, policy, fleet)) for policy in policies]
    ages = SIGNAL_AGES_S if POLICIES["prefix"] in policies else ()
    return Report(lines, [_with_signal_age(trace, fleet, age_s) for age_s in ages])


def _with_signal_age(trace: Trace, fleet: Fleet, age_s: float) -> ReportLine:
    older = replace(fleet, loads=ChannelQuality(delay_s=age_s))
    label = f"prefix, load {age_s * 1000:.0f} ms old" if age_s else "prefix, load exact"
    return report_line(label, replay(trace, POLICIES["prefix"], older))


def _fleet(options: argparse.Namespace) -> Fleet:
    return Fleet(
        num_workers=options.workers,
        num_cache_blocks=options.cache_blocks,
        num_prefill_workers=options.prefill_workers,
        rates=ServingRates(
            prefill_tokens_per_s=options.prefill_rate,
            decode_slowdown=options.decode_slowdown,
            decode_tokens_per_s=options.decode_rate,
            kv_transfer_tokens_per_s=options.kv_transfer_rate,
        ),
        events=ChannelQuality(options.event_delay, options.event_loss),
        loads=ChannelQuality(options.load_signal_age, options.load_signal_loss),
    )


def _describe(recorded: Trace, calibration: Calibration, fleet: Fleet) -> str:
    num_requests = len(recorded.requests)
    pace = recorded.span_s / calibration.trace.span_s
    shortfall = (
        ""
        if calibration.is_reached
        else f"\nload {calibration.wanted_load:.0%} is out of reach: these sessions wait for their answers;"
        " fewer workers or a higher --decode-rate would get there"
    )
    return (
        f"{recorded.name}: {num_requests} requests, {recorded.num_tokens / num_requests:.0f} prompt tokens each,"
        f" ideal hit rate {recorded.ideal_hit_rate:.1%}\n"
        f"{fleet.num_workers} workers with {fleet.num_cache_blocks} blocks of {recorded.block_size} tokens,"
        f" {fleet.num_prefill_workers} prefill workers;"
        f" arrivals at {pace:.2f}x the recorded pace, where random routing is"
        f" {calibration.measured_load:.0%} busy{shortfall}"
    )


def _format(report: Report) -> str:
    tables = [format_table(report.policies)]
    if report.signal_ages:
        tables.append(format_table(report.signal_ages))
    return "\n\n".join(["", *tables])


def _parser() -> argparse.ArgumentParser:
    rates, perfect = ServingRates(), ChannelQuality()
    parser = argparse.ArgumentParser(
        prog="python -m bench.simulator",
        description="Replay a request trace against simulated workers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("trace", type=Path, help="Mooncake, coding-agent (RLE) or agent-text trace, .jsonl or .jsonl.gz")
    add("--workers", type=_positive_int, default=8)
    add("--cache-blocks", type=_positive_int, default=4000, help="blocks per worker (512 tokens; agent text: 64)")
    add("--load", type=_positive, default=0.7, help="share of time that random routing keeps the workers' prefill busy")
    add("--policies", type=_policies, default=DEFAULT_POLICIES, help=f"of {','.join(POLICIES)}")
    add("--lines", type=_positive_int, help="read only the first lines: requests, or whole sessions")
    add("--json", type=_output_file, help="write one row per policy here")
    add(
        "--plot", type=_output_file, help="draw the table here (needs matplotlib); by default beside the rows of --json"
    )
    add("--load-signal-age", type=_not_negative, default=perfect.delay_s, help="seconds")
    add("--load-signal-loss", type=_probability, default=perfect.loss)
    add("--event-delay", type=_not_negative, default=perfect.delay_s, help="seconds, of KV events")
    add("--event-loss", type=_probability, default=perfect.loss)
    add("--prefill-workers", type=_count, default=0, help="workers that only prefill, for all others")
    add("--prefill-rate", type=_positive, default=rates.prefill_tokens_per_s, help="tokens per second")
    add("--decode-slowdown", type=_not_negative, default=rates.decode_slowdown, help="per decoding context token")
    add("--decode-rate", type=_positive, default=rates.decode_tokens_per_s, help="tokens per second and stream")
    add("--kv-transfer-rate", type=_positive, default=rates.kv_transfer_tokens_per_s, help="tokens of KV per second")
    return parser


def _policies(names: str) -> list[SimulatedPolicy]:
    unknown = [name for name in names.split(",") if name not in POLICIES]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown policy {', '.join(unknown)}; known are {', '.join(POLICIES)}")
    return [POLICIES[name] for name in names.split(",")]


def _positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < inf:
        raise argparse.ArgumentTypeError(f"{value} is not above 0, or not finite")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < inf:
        raise argparse.ArgumentTypeError(f"{value} is below 0, or not finite")
    return value


def _output_file(text: str) -> Path:
    """Looked at before anything is simulated."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder, or in a folder that does not exist")
    return path


def _probability(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not in [0, 1)")
    return value


if __name__ == "__main__":
    main()
