"""The peers' parts of docs/benchmarks.md and README.md, written from the records docs/peers*.json.

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
README = "README.md"
README_PART = "numbers"
RECORDS = ("peers", "peers-smollm2")
_MARK = "<!-- {}: {} -->\n"

_OURS = "outrider"
# Records, peers and numbers of streams that README.md quotes; without drafts where a peer had none.
_README_LEADS = (
    ("peers", "transformers", 1, None),
    ("peers", "openvino", 1, None),
    ("peers-smollm2", "llama-server", 1, "plain"),
    ("peers-smollm2", "openvino", 8, "plain"),
)

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
            f"{self.limits.num_threads} threads; {self.machine}; load average at the start {self.load_before:.1f}.",
            f"{', '.join(f'{name} {number}' for name, number in self.versions.items())}, {OPENVINO} "
            f"(exported by {OPENVINO_EXPORT}), {LLAMA}.",
        ]

    @property
    def machine(self) -> str:
        return f"{_processor()}, {os.cpu_count()} cores"

    @property
    def versions(self) -> dict[str, str]:
        """The versions of packages in this environment; peers are pinned."""
        return {name: version(name) for name in ("torch", "transformers", "ray")}


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
    """Return the results of a run as JSON: command, machine, versions, settings, rows and failures."""
    peers = (each.partition("==")[::2] for each in (OPENVINO, OPENVINO_EXPORT, LLAMA))
    return {
        "command": conditions.command,
        "machine": conditions.machine,
        "versions": {**conditions.versions, **dict(peers)},
        "model": conditions.target,
        "rounds": conditions.num_rounds,
        "conditions": conditions.lines(),
        "settings": [list(each) for each in dict.fromkeys((system.name, system.settings) for system in systems)],
        "rows": [asdict(row) for row in rows],
        "failures": results.failures,
    }


def write(folder: Path, name: str, record: Record) -> None:
    """Write the record as JSON, and its part of the page where the folder has the page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    page, readme = folder / PAGE, folder.parent / README
    if page.exists():
        page.write_text(with_part(page.read_text(encoding="utf-8"), name, part(record)), encoding="utf-8")
        text = readme.read_text(encoding="utf-8")
        readme.write_text(with_part(text, README_PART, readme_part(read_records(folder))), encoding="utf-8")


def read_records(folder: Path = DOCS) -> dict[str, Record]:
    """Return the records of a folder by name."""
    files = {name: folder / f"{name}.json" for name in RECORDS}
    return {name: json.loads(file.read_text(encoding="utf-8")) for name, file in files.items() if file.is_file()}


def with_part(page: str, name: str, text: str) -> str:
    """Return the page with a text between the two marks of a name."""
    begin, end = _MARK.format(name, "begin"), _MARK.format(name, "end")
    head, _, rest = page.partition(begin)
    return f"{head}{begin}\n{text}\n{end}{rest.partition(end)[2]}"


def readme_part(records: Mapping[str, Record]) -> str:
    """Return README's table: each row one ratio of one record, with its doubts; none for a record that is not there."""
    text = "| | against | conditions |\n|---|---|---|\n"
    for name, peer, num_streams, mode in _README_LEADS:
        if (record := records.get(name)) is None or (found := _lead(record["rows"], num_streams, peer, mode)) is None:
            continue
        ours, theirs, doubts = found
        streams = "one stream" if num_streams == 1 else f"{num_streams} streams"
        rounds = "one round" if record["rounds"] == 1 else f"{record['rounds']} rounds"
        conditions = [f"{_named(ours)}, {ours['text']}", streams, record["model"], record["machine"], rounds, *doubts]
        ratio = ours["tokens_per_second"] / theirs["tokens_per_second"]
        text += f"| **{ratio:.1f}x** | {_named(theirs)} | {'; '.join(conditions)} |\n"
    return text


def _named(row: Record) -> str:
    return f"{row['system']}, {row['mode']}"


def _lead(rows: Seq[Record], num_streams: int, peer: str, mode: str | None) -> tuple[Record, Record, list[str]] | None:
    """Return our fastest row of the first text, a peer's, and reasons why the two are not best against best."""
    fits = [row for row in rows if row["num_streams"] == num_streams and row["text"] == rows[0]["text"]]
    fits = [row for row in fits if mode in (None, row["mode"])]
    sides = [
        [row for row in fits if row["system"].startswith(_OURS)],
        [row for row in fits if not row["system"].startswith(_OURS) and row["system"].startswith(peer)],
    ]
    if not all(sides):
        return None
    ours, theirs = (max(side, key=lambda row: float(row["tokens_per_second"])) for side in sides)
    return ours, theirs, [] if mode else _doubts(ours, sides[1])


def _doubts(ours: Record, peers: Seq[Record]) -> list[str]:
    """Return why a comparison with drafts is not best against best."""
    drafting = [row for row in peers if row["mode"] != DraftingMode.PLAIN]
    if not drafting:
        return ["not best against best: the peer ran without drafts"]
    fixed = any(row["num_tried"] == 1 for row in (*drafting, ours) if row["mode"] != DraftingMode.PLAIN)
    return ["not best against best: one setting of drafts each"] if fixed else []


def part(record: Record) -> str:
    """Return the table and the conditions of a record as Markdown, list items wrapped at 120 columns."""
    rows = record["rows"]
    lines = [f"- {line}" for line in (*record["conditions"], *_caveats(rows))]
    lines += [f"- Not measured to the end: {system}: {reason}" for system, reason in record["failures"].items()]
    fill = partial(textwrap.fill, width=120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    tables = []
    for text in dict.fromkeys(row["text"] for row in rows):
        members = [row for row in rows if row["text"] == text]
        tables.append(f"{text}:\n\n{_table(members)}{_leads_table(members)}")
    return "\n".join(tables) + "\n" + "".join(f"{fill(line)}\n" for line in lines)


def _leads_table(rows: Seq[Record]) -> str:
    """Return the ratios of our fastest row to the fastest peer's, both plain and each with its drafts."""
    streams = sorted({row["num_streams"] for row in rows})
    text = ""
    for label, mode in (("both plain", DraftingMode.PLAIN), ("with drafts", None)):
        found = [_lead(rows, number, "", mode) for number in streams]
        leads = [lead for lead in found if lead is not None]
        if len(leads) < len(streams):
            continue
        doubts = dict.fromkeys(doubt for *_, reasons in leads for doubt in reasons)
        cells = "".join(
            f" {ours['tokens_per_second'] / theirs['tokens_per_second']:.2f} ({theirs['system'].partition(' ')[0]}) |"
            for ours, theirs, _ in leads
        )
        text += f"| {label}{''.join(f'; {doubt}' for doubt in doubts)} |{cells}\n"
    if not text:
        return ""
    head = "".join(f" {number} stream{'s' if number > 1 else ''} |" for number in streams)
    return f"\n| fastest of ours over the fastest peer |{head}\n|---|{'---|' * len(streams)}\n{text}"


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
    for each, found in read_records().items():
        write(DOCS, each, found)
