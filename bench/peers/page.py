"""The peers' part of docs/benchmarks.md, written from the records docs/peers*.json.

python -m bench.peers.page    writes the parts again, without a run
"""

from __future__ import annotations

import json
import os
import statistics
import textwrap
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.contenders.contender import equal_share
from bench.peers.install import LLAMA, OPENVINO, OPENVINO_EXPORT
from bench.peers.system import DraftingMode, Measurement, RaceResults, System, SystemLimits

TOGETHER_S = 1e-3
DOCS = Path(__file__).parents[2] / "docs"
PAGE = "benchmarks.md"
RECORDS = ("peers", "peers-smollm2")
_MARK = "<!-- {}: {} -->\n"

Record = dict[str, Any]
Percentiles = dict[str, float]  # p50 and p99, in milliseconds


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One system in one mode on one kind of text at one number of streams, at the fastest of `num_tried` settings.

    `first_token` is from the start of the run, `between` from one arrival of tokens to the next of the same stream.
    `own_share` is the share of tokens equal to the system's own without the draft, `reference_share` to the reference.
    """

    system: str
    mode: DraftingMode
    text: str
    num_streams: int
    setting: str
    num_tried: int
    tokens_per_second: float
    lowest: float
    highest: float
    first_token: Percentiles
    between: Percentiles
    own_share: float | None
    reference_share: float


@dataclass(frozen=True, slots=True)
class Conditions:
    """The conditions of the figures."""

    target: str
    note: str
    num_rounds: int
    num_tokens: int
    num_prompt_tokens: int
    limits: SystemLimits
    load_before: float
    command: str

    def lines(self) -> list[str]:
        lengths = ", ".join(map(str, self.limits.draft_lengths))
        return [
            f"`{self.command}`. Target: {self.target}, {self.note}.",
            f"Each system drafts at the fastest of its settings (K of {lengths}; kinds and lengths of n-grams), "
            "searched once for each text and number of streams. The record has them.",
            f"{self.num_prompt_tokens} prompt tokens, {self.num_tokens} greedy tokens for each; rounds: "
            f"{self.num_rounds}, each after a warm-up of every system.",
            f"{self.limits.num_threads} threads; {_processor()}, {os.cpu_count()} cores; load average at "
            f"the start {self.load_before:.1f}.",
            f"torch {version('torch')}, transformers {version('transformers')}, ray {version('ray')}, {OPENVINO} "
            f"(exported by {OPENVINO_EXPORT}), {LLAMA}.",
        ]


def rows_of(measurements: Seq[Measurement], references: Mapping[str, Seq[Seq[int]]]) -> list[PeerRow]:
    """Return the rows by text and number of streams, then in the order of the systems' first runs."""
    runs: dict[tuple[str, int, str, DraftingMode], list[Measurement]] = {}
    for each in measurements:
        runs.setdefault((each.text, each.num_streams, each.system, each.mode), []).append(each)
    rows = []
    for (text, num_streams, system, mode), measured in sorted(runs.items(), key=lambda item: item[0][:2]):
        members = [each.run for each in measured]
        plain = runs.get((text, num_streams, system, DraftingMode.PLAIN))
        speeds = [run.tokens_per_second for run in members]
        arrivals = [times for run in members for times in run.arrivals or ()]
        row = PeerRow(
            system,
            mode,
            text,
            num_streams,
            measured[0].setting,
            measured[0].num_tried,
            statistics.median(speeds),
            min(speeds),
            max(speeds),
            _percentiles([times[0] for times in arrivals]),
            _percentiles([gap for times in arrivals for gap in gaps(times)]),
            equal_share(members[0].outputs, plain[0].run.outputs) if plain and mode is not DraftingMode.PLAIN else None,
            equal_share(members[0].outputs, references[text][:num_streams]),
        )
        rows.append(row)
    return rows


def gaps(arrivals: Seq[float]) -> list[float]:
    """Return the seconds between arrivals; those within `TOGETHER_S` are one, as some servers split a pass's tokens."""
    return [gap for before, after in pairwise(arrivals) if (gap := after - before) > TOGETHER_S]


def _percentiles(seconds: Seq[float]) -> Percentiles:
    p50, p99 = 1e3 * np.percentile(seconds or [0.0], [50, 99])
    return {"p50": float(p50), "p99": float(p99)}


def record_of(rows: Seq[PeerRow], results: RaceResults, systems: Seq[System], conditions: Conditions) -> Record:
    """Return the results of a run as JSON: conditions, settings, rows and failures."""
    return {
        "conditions": conditions.lines(),
        "settings": [list(each) for each in dict.fromkeys((system.name, system.settings) for system in systems)],
        "rows": [asdict(row) for row in rows],
        "failures": results.failures,
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
    return f"{head}{begin}\n{part(record)}\n{end}{rest.partition(end)[2]}"


def part(record: Record) -> str:
    """Return the table and the conditions of a record as Markdown, list items wrapped at 120 columns."""
    rows = record["rows"]
    lines = [f"- {line}" for line in (*record["conditions"], *_caveats(rows))]
    lines += [f"- Not measured to the end: {system}: {reason}" for system, reason in record["failures"].items()]
    fill = partial(textwrap.fill, width=120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    tables = [
        f"{text}:\n\n{_table([row for row in rows if row['text'] == text])}"
        for text in dict.fromkeys(row["text"] for row in rows)
    ]
    return "\n".join(tables) + "\n" + "".join(f"{fill(line)}\n" for line in lines)


def _caveats(rows: Seq[Record]) -> list[str]:
    """Return sentences on the systems that did not run at their best."""
    drafting = [row for row in rows if row["mode"] != DraftingMode.PLAIN]
    drafting_systems = {row["system"] for row in drafting}
    plain = dict.fromkeys(row["system"] for row in rows if drafting and row["system"] not in drafting_systems)
    fixed = dict.fromkeys(f"{row['system']} {row['mode']}" for row in drafting if row["num_tried"] == 1)
    names = "every system" if all(row["num_tried"] == 1 for row in drafting) else ", ".join(fixed)
    return [
        *([f"Without the drafts that they have: {', '.join(plain)}."] if plain else []),
        *([f"With one setting of drafts, without a search for the best: {names}."] if fixed else []),
    ]


def _table(rows: Seq[Record]) -> str:
    """A row per system and mode, a column per number of streams; shares are the least over all streams."""
    streams = sorted({row["num_streams"] for row in rows})
    fastest = {n: max(row["tokens_per_second"] for row in rows if row["num_streams"] == n) for n in streams}
    head = "".join(f" {n} stream{'s' if n > 1 else ''} |" for n in streams)
    text = f"| tokens/s (first token, ms) | |{head} own | f32 |\n|---|---|{'---|' * len(streams)}---|---|\n"
    for system, mode in dict.fromkeys((row["system"], row["mode"]) for row in rows):
        members = {row["num_streams"]: row for row in rows if (row["system"], row["mode"]) == (system, mode)}
        cells = "".join(f" {_cell(members.get(n), fastest[n])} |" for n in streams)
        own = [row["own_share"] for row in members.values() if row["own_share"] is not None]
        reference = min(row["reference_share"] for row in members.values())
        text += f"| {system} | {mode} |{cells} {_percent(min(own)) if own else ''} | {_percent(reference)} |\n"
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


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "processor unknown"


if __name__ == "__main__":
    for each in RECORDS:
        write(DOCS, each, json.loads((DOCS / f"{each}.json").read_text(encoding="utf-8")))
