"""The peers' part of docs/benchmarks.md, written from the records docs/peers*.json.

python -m bench.peers.page    writes the parts again, without a run
"""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.peers.install import LLAMA, OPENVINO, OPENVINO_EXPORT
from bench.peers.rounds import Outcome
from bench.peers.rows import Row
from bench.peers.system import Limits, System

NUM_PROCESSES = 6
DOCS = Path(__file__).parents[2] / "docs"
PAGE = "benchmarks.md"
RECORDS = ("peers", "peers-smollm2")
_MARK = "<!-- {}: {} -->\n"

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions of the figures."""

    target: str
    note: str
    num_rounds: int
    num_tokens: int
    num_prompt_tokens: int
    limits: Limits
    load_before: float

    def lines(self) -> list[str]:
        return [
            f"Target: {self.target}, {self.note}. K = {self.limits.num_draft_tokens} for all.",
            f"{self.num_prompt_tokens} prompt tokens from held-out files, {self.num_tokens} greedy tokens for each; "
            f"rounds: {self.num_rounds}, each after a warm-up of every system.",
            f"{self.limits.num_threads} threads; {_processor()}, {os.cpu_count()} cores; load average at "
            f"the start {self.load_before:.1f}.",
            f"torch {version('torch')}, transformers {version('transformers')}, ray {version('ray')}, {OPENVINO} "
            f"(exported by {OPENVINO_EXPORT}), {LLAMA}.",
        ]


def record_of(rows: Seq[Row], outcome: Outcome, systems: Seq[System], conditions: Conditions) -> Record:
    """Return all that a run has shown, as JSON: conditions, settings, memory, rows and failures."""
    return {
        "conditions": conditions.lines(),
        "settings": [list(each) for each in dict.fromkeys((system.name, system.settings) for system in systems)],
        "memory_mb": _memory(outcome),
        "rows": [asdict(row) for row in rows],
        "failures": outcome.failures,
    }


def write(folder: Path, name: str, record: Record) -> None:
    """Write the record as JSON, and its part of the page where the folder has the page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    page = folder / PAGE
    if page.exists():
        page.write_text(with_part(page.read_text(encoding="utf-8"), name, record), encoding="utf-8")


def with_part(page: str, name: str, record: Record) -> str:
    """Return the page's text with the record's part between its two marks."""
    begin, end = _MARK.format(name, "begin"), _MARK.format(name, "end")
    head, _, rest = page.partition(begin)
    return f"{head}{begin}\n{part(name, record)}\n{end}{rest.partition(end)[2]}"


def part(name: str, record: Record) -> str:
    """Return the plot, the table and the conditions of a record as Markdown."""
    lines = [f"- {line}" for line in record["conditions"]]
    lines += [f"- Not measured to the end: {system}: {reason}" for system, reason in record["failures"].items()]
    return f"![tokens per second by streams]({name}.png)\n\n{_table(record['rows'])}\n{_wrapped(lines)}"


def _wrapped(lines: Seq[str]) -> str:
    """Wrap list items at 120 columns, which tests/test_docs.py asks of every page."""
    fill = partial(textwrap.fill, width=120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "".join(f"{fill(line)}\n" for line in lines)


def _table(rows: Seq[Record]) -> str:
    """A row per system and mode, a column per number of streams; shares are the least over all streams."""
    streams = sorted({row["num_streams"] for row in rows})
    fastest = {n: max(row["tokens_per_second"] for row in rows if row["num_streams"] == n) for n in streams}
    head = "".join(f" {n} stream{'s' if n > 1 else ''} |" for n in streams)
    text = (
        f"| tokens/s (first token, ms) | |{head} own | f32 | peak MB |\n|---|---|{'---|' * len(streams)}---|---|---|\n"
    )
    for system, mode in dict.fromkeys((row["system"], row["mode"]) for row in rows):
        members = {row["num_streams"]: row for row in rows if (row["system"], row["mode"]) == (system, mode)}
        cells = "".join(f" {_cell(members.get(n), fastest[n])} |" for n in streams)
        own = [row["own_share"] for row in members.values() if row["own_share"] is not None]
        reference = min(row["reference_share"] for row in members.values())
        peak = max(row["peak_mb"] for row in members.values())
        text += (
            f"| {system} | {mode} |{cells} {_percent(min(own)) if own else ''} | {_percent(reference)} | {peak:.0f} |\n"
        )
    return text


def _cell(row: Record | None, fastest: float) -> str:
    if row is None:
        return ""
    speed = f"{row['tokens_per_second']:.1f}"
    speed = f"**{speed}**" if row["tokens_per_second"] == fastest else speed
    return f"{speed} ({row['first_token']['p50']:.0f})"


def _percent(share: float) -> str:
    """Round down, so that 100% means all."""
    return f"{int(1000 * share) / 10:g}%"


def _memory(outcome: Outcome) -> dict[str, str]:
    """Return the MB of each process by system, largest first; modes of one process share an entry."""
    modes: dict[tuple[str, str], list[str]] = {}
    for (name, mode), peaks in outcome.peaks.items():
        largest = sorted(peaks.items(), key=lambda item: -item[1])
        parts = [f"{process} {size / 1e6:.0f}" for process, size in largest[:NUM_PROCESSES]]
        rest = sum(size for _, size in largest[NUM_PROCESSES:])
        parts += [f"{len(largest) - NUM_PROCESSES} others {rest / 1e6:.0f}"] if rest else []
        modes.setdefault((name, ", ".join(parts)), []).append(mode)
    return {f"{name}, {' and '.join(members)}": parts for (name, parts), members in modes.items()}


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "processor unknown"


if __name__ == "__main__":
    for each in RECORDS:
        write(DOCS, each, json.loads((DOCS / f"{each}.json").read_text(encoding="utf-8")))
