"""The peers' parts of docs/benchmarks.md and README.md, written from the records docs/peers*.json.

python -m bench.peers.page    writes the parts again, without a run
"""

from __future__ import annotations

import json
import os
import statistics
import textwrap
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.contenders.contender import equal_share
from bench.peers.install import LLAMA, LLAMA_SOURCE, OPENVINO, OPENVINO_EXPORT, VLLM, VLLM_SUFFIXES
from bench.peers.shapes import SHAPES
from bench.peers.system import DraftingMode, Measurement, RaceResults, System, SystemLimits

TOGETHER_S = 1e-3
DOCS = Path(__file__).parents[2] / "docs"
PAGE = "benchmarks.md"
README = "README.md"
README_PART = "numbers"
RECORDS = ("peers", "peers-smollm2")
SHAPES_PART = "peers-shapes"
SHAPE_RECORDS = tuple(f"peers-{shape}" for shape in SHAPES)
_MARK = "<!-- {}: {} -->\n"

_OURS = "outrider"
_NO_RAY = "no Ray"
_SHARES = ("own_share", "reference_share")
# Records, peers and numbers of streams that README.md quotes; without drafts where a peer had none.
_README_LEADS = (
    ("peers", "transformers", 1, None),
    ("peers-smollm2", "llama-server", 1, None),
    ("peers-smollm2", "openvino", 8, None),
    ("peers-qwen3-moe-0.9b", "llama-server", 1, "plain"),
    ("peers-qwen3-moe-0.9b", "openvino", 8, "plain"),
)

Record = dict[str, Any]
Percentiles = dict[str, float]  # p50 and p99, in milliseconds


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One system in one mode on one kind of text at one number of streams, at the fastest of `num_tried` settings.

    `first_token` is from the start of the run, `between` from one arrival of tokens to the next of the same stream.
    `own_share` is the share of tokens equal to the system's own without the draft, `reference_share` to the reference,
    if there is one.
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
    reference_share: float | None


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
            f"{self.num_prompt_tokens} prompt tokens, {self.num_tokens} greedy tokens for each; K of {lengths}; "
            f"rounds: {self.num_rounds}, each after a warm-up of every system.",
            f"{self.limits.num_threads} threads; {self.machine}; load average at the start {self.load_before:.1f}.",
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
            equal_share(members[0].outputs, references[text][:num_streams]) if text in references else None,
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
    peers = (
        each.partition("==")[::2] for each in (OPENVINO, OPENVINO_EXPORT, LLAMA, LLAMA_SOURCE, VLLM, VLLM_SUFFIXES)
    )
    return {
        "command": conditions.command,
        "machine": conditions.machine,
        "versions": {**conditions.versions, **dict(peers)},
        "model": conditions.target,
        "rounds": conditions.num_rounds,
        "conditions": conditions.lines(),
        "settings": [list(each) for each in dict.fromkeys((system.name, system.settings) for system in systems)],
        "starts": {system: [asdict(each) for each in starts] for system, starts in results.starts.items()},
        "rows": [asdict(row) for row in rows],
        "failures": results.failures,
    }


def write(folder: Path, name: str, record: Record) -> None:
    """Write the record as JSON, and its part of the page where the folder has the page."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    page, readme = folder / PAGE, folder.parent / README
    if page.exists():
        name, text = (SHAPES_PART, shapes_part(read_records(folder))) if name in SHAPE_RECORDS else (name, part(record))
        page.write_text(with_part(page.read_text(encoding="utf-8"), name, text), encoding="utf-8")
        text = readme.read_text(encoding="utf-8")
        readme.write_text(with_part(text, README_PART, readme_part(read_records(folder))), encoding="utf-8")


def read_records(folder: Path = DOCS) -> dict[str, Record]:
    """Return the records of a folder by name."""
    files = {name: folder / f"{name}.json" for name in (*RECORDS, *SHAPE_RECORDS)}
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
    """Return the first text's table, all texts' ratios and the conditions as Markdown, wrapped at 120 columns."""
    rows = record["rows"]
    lines = [f"- {line}" for line in (*record["conditions"], *_caveats(rows))]
    lines += [f"- Not measured to the end: {system}: {reason}" for system, reason in record["failures"].items()]
    text = f"{rows[0]['text']}:\n\n{_table(record)}{_leads_table(rows)}\n"
    return text + "".join(f"{_filled(line)}\n" for line in lines)


def shapes_part(records: Mapping[str, Record]) -> str:
    """Return the plain figures of random weights in published shapes, all records in one table, as Markdown."""
    shapes = [records[name] for name in SHAPE_RECORDS if name in records]
    keys = list(dict.fromkeys((row["text"], row["num_streams"]) for each in shapes for row in each["rows"]))
    short = next(iter(keys), ("", 0))[0]
    heads = [
        f"{streams} stream{'s' if streams > 1 else ''}" if text == short else f"first token after {text.split(', ')[1]}"
        for text, streams in keys
    ]
    table = f"| | {' | '.join(heads)} | ready, s | GB |\n|---|{'---|' * (len(keys) + 2)}\n"
    for record in shapes:
        for system in dict.fromkeys(row["system"] for row in record["rows"]):
            plain = [row for row in record["rows"] if (row["system"], row["mode"]) == (system, DraftingMode.PLAIN)]
            found = {(row["text"], row["num_streams"]): row for row in plain}
            cells = [_shape_cell(found.get(key), key[0] == short) for key in keys]
            starts = _started(record["starts"].get(system, []))
            table += f"| {record['model']}, {system} | {' | '.join(cells)} |{starts}\n"
    lines = []
    for record in shapes:
        left_out = "".join(f" Not measured: {system}: {reason}." for system, reason in record["failures"].items())
        lines.append(f"{record['model']}, rounds: {record['rounds']}; {record['conditions'][-1]}{left_out}")
    return table + "\n" + "".join(f"{_filled(f'- {line}')}\n" for line in lines)


def _shape_cell(row: Record | None, is_short: bool) -> str:
    if row is None:
        return ""
    return _cell(row, 0.0) if is_short else f"{row['first_token']['p50'] / 1e3:.1f} s"


def _filled(line: str) -> str:
    """Return a list item wrapped at 120 columns."""
    return textwrap.fill(line, width=120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _leads_table(rows: Seq[Record]) -> str:
    """Return the ratios of our fastest row to the fastest peer's on each text, both plain and each with its drafts."""
    streams = sorted({row["num_streams"] for row in rows})
    text = ""
    for kind in dict.fromkeys(row["text"] for row in rows):
        members = [row for row in rows if row["text"] == kind]
        for label, mode in (("both plain", DraftingMode.PLAIN), ("with drafts", None)):
            leads = [_lead(members, number, "", mode) for number in streams]
            found = [lead for lead in leads if lead is not None]
            if not found or (mode is None and all(row["mode"] == DraftingMode.PLAIN for row in members)):
                continue
            doubts = dict.fromkeys(doubt for *_, reasons in found for doubt in reasons)
            cells = "".join(f" {_ratio(lead)} |" for lead in leads)
            text += f"| {kind}, {label}{''.join(f'; {doubt}' for doubt in doubts)} |{cells}\n"
    if not text:
        return ""
    head = "".join(f" {number} stream{'s' if number > 1 else ''} |" for number in streams)
    return f"\n| fastest of ours over the fastest peer |{head}\n|---|{'---|' * len(streams)}\n{text}"


def _ratio(lead: tuple[Record, Record, list[str]] | None) -> str:
    if lead is None:
        return ""
    ours, theirs, _ = lead
    return f"{ours['tokens_per_second'] / theirs['tokens_per_second']:.2f} ({theirs['system'].partition(' ')[0]})"


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


def _table(record: Record) -> str:
    """A row per system and mode of the first text, a column per number of streams; shares are the least over all.

    A precision that is never its peer's fastest is left out.

    Then come the first start and the most memory at any start.
    """
    first = record["rows"][0]["text"]
    rows, starts = [row for row in record["rows"] if row["text"] == first], record.get("starts", {})
    streams = sorted({row["num_streams"] for row in rows})
    fastest = {n: max(row["tokens_per_second"] for row in rows if row["num_streams"] == n) for n in streams}
    head = "".join(f" {n} stream{'s' if n > 1 else ''} |" for n in streams)
    text = (
        f"| tokens/s (first token, ms) | |{head} own | f32 | ready, s | GB |\n|---|---|{'---|' * (len(streams) + 4)}\n"
    )
    for system, mode in dict.fromkeys((row["system"], row["mode"]) for row in rows if _is_peers_fastest(row, rows)):
        members = {row["num_streams"]: row for row in rows if (row["system"], row["mode"]) == (system, mode)}
        cells = "".join(f" {_cell(members.get(n), fastest[n])} |" for n in streams)
        shares = "".join(
            f" {_least(row[key] for row in members.values())} |" for key in ("own_share", "reference_share")
        )
        started = _started(starts.get(system, []) if mode == DraftingMode.PLAIN else [])
        text += f"| {system} | {mode} |{cells}{shares}{started}\n"
    return text


def _is_peers_fastest(row: Record, rows: Seq[Record]) -> bool:
    """Whether no other precision of the same peer is faster at this mode and number of streams."""

    def place(each: Record) -> tuple[object, ...]:
        system = each["system"]
        return system.partition(" ")[0], system.endswith(_NO_RAY), each["mode"], each["num_streams"]

    fits = (each["tokens_per_second"] for each in rows if place(each) == place(row))
    return bool(row["tokens_per_second"] == max(fits))


def _least(shares: Iterable[float | None]) -> str:
    found = [share for share in shares if share is not None]
    return _percent(min(found)) if found else ""


def _started(starts: Seq[Record]) -> str:
    """Return the cells of the first start's seconds, the later ones' median, and of the most memory."""
    if not starts:
        return " | |"
    seconds = [each["ready_s"] for each in starts]
    later = f", {statistics.median(seconds[1:]):.1f}" if seconds[1:] else ""
    memory = max(each["peak_bytes"] or 0 for each in starts)
    return f" {seconds[0]:.1f}{later} | {f'{memory / 1e9:.2f}' if memory else ''} |"


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
