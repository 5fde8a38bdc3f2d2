"""The report of a replay: one row of figures, rows as a table, rows as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bench.simulator.replay import ReplayResult

BASELINE = "p2c"


@dataclass(frozen=True, slots=True)
class Row:
    """The figures of one policy on one trace; its fields are the keys of the JSON file."""

    policy: str
    hit_rate: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    imbalance: float


@dataclass(frozen=True, slots=True)
class ReportLine:
    """A row, and what only the table shows: reuse achieved of what was achievable (None.

    The policy looks at no prefix).
    """

    row: Row
    efficiency: float | None


def report_line(label: str, result: ReplayResult) -> ReportLine:
    """Return the figures of `result` under the name `label`."""
    p50, p95, p99 = (float(value) for value in np.percentile(result.ttft_s, [50, 95, 99]))
    row = Row(label, result.hit_rate, float(result.ttft_s.mean()), p50, p95, p99, result.imbalance)
    return ReportLine(row, result.audit.efficiency if result.audit.num_requests else None)


def format_table(lines: Sequence[ReportLine]) -> str:
    """Return a text table; the last columns compare with power-of-two where that is among the rows."""
    baseline = next((line.row for line in lines if line.row.policy == BASELINE), None)
    head = ["policy", "hit rate", "TTFT mean", "p50", "p95", "p99", "imbalance", "achieved", "mean/p2c", "p95/p2c"]
    cells = [head, *(_cells(line, baseline) for line in lines)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return "\n".join(_format_row(row, widths) for row in cells)


def write_json(rows: Sequence[Row], path: Path) -> None:
    """A JSON array with one object per row, one per line."""
    path.write_text("[\n" + ",\n".join(json.dumps(asdict(row)) for row in rows) + "\n]\n", encoding="utf-8")


def _cells(line: ReportLine, baseline: Row | None) -> list[str]:
    row = line.row
    times = [f"{value:.3f} s" for value in (row.ttft_mean_s, row.ttft_p50_s, row.ttft_p95_s, row.ttft_p99_s)]
    achieved = "-" if line.efficiency is None else f"{line.efficiency:.0%}"
    return [row.policy, f"{row.hit_rate:.1%}", *times, f"{row.imbalance:.2f}", achieved, *_compared(row, baseline)]


def _compared(row: Row, baseline: Row | None) -> list[str]:
    if baseline is None:
        return ["-", "-"]
    pairs = ((row.ttft_mean_s, baseline.ttft_mean_s), (row.ttft_p95_s, baseline.ttft_p95_s))
    return [f"{ours / theirs - 1:+.0%}" if theirs else "-" for ours, theirs in pairs]


def _format_row(row: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = (
        cell.ljust(width) if not column else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return "  ".join([first, *rest])
