"""docs/peers.md: tables, every system's settings, and the conditions. The command writes the whole page."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path

from bench.peers.install import LLAMA, OPENVINO, OPENVINO_EXPORT
from bench.peers.rounds import Outcome
from bench.peers.rows import Row
from bench.peers.system import Limits, System

NUM_PROCESSES = 6
INTRODUCTION = """# Against its peers

Written by `make bench-peers` (`bench/peers/`) under the conditions at its end: do not edit. The same model, the same
prompts, one system alive at a time with the machine to itself, rounds of all systems in turn. The prompts are distinct,
given as token ids, and nothing is taken from a prefix cache. Outrider is measured as a user meets it, through its HTTP
interface and Ray Serve; llama-server through its HTTP interface too; OpenVINO GenAI and Transformers inside a Python
process, with no server between.
"""
LEGEND = """- **tokens/s**: of all streams together, prefill included; median of the rounds (lowest and highest).
- **first**: milliseconds from the start of the run to a stream's first token. **gap**: from one arrival of tokens to
  the next of the same stream; with a draft an arrival brings several. p50 and p99 over all streams and rounds.
- **own**: the share of tokens that are with the draft what they are without it, in the same system. **f32**: the share
  equal to Transformers' greedy text in float32. In bf16 two ways to sum may part at a near-tie, and all that follows
  then differs.
- **peak MB**: resident memory, the largest of each process since its start, added up. Outrider's includes Ray and both
  modes; it is listed by process below. Pages that processes share are counted in each.
"""


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
            f"- Target: {self.target}, {self.note}. K = {self.limits.num_draft_tokens} for all.",
            f"- {self.num_prompt_tokens} prompt tokens from held-out files, {self.num_tokens} greedy tokens for each; "
            f"rounds: {self.num_rounds}, each after a warm-up of every system.",
            f"- {self.limits.num_threads} threads; {_processor()}, {os.cpu_count()} cores; load average at "
            f"the start {self.load_before:.1f}.",
            f"- torch {version('torch')}, transformers {version('transformers')}, ray {version('ray')}, {OPENVINO} "
            f"(exported by {OPENVINO_EXPORT}), {LLAMA}.",
        ]


def write(path: Path, rows: Seq[Row], outcome: Outcome, systems: Seq[System], conditions: Conditions) -> None:
    """Write the page and, beside it, its figures as JSON; it shows a plot of its name (`bench.peers.plot`)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"conditions": asdict(conditions), "rows": [asdict(row) for row in rows], "failures": outcome.failures}
    path.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    path.write_text(page(f"{path.stem}.png", rows, outcome, systems, conditions))


def page(plot: str, rows: Seq[Row], outcome: Outcome, systems: Seq[System], conditions: Conditions) -> str:
    """Return the text of the page, which shows the file `plot` beside it."""
    parts = [INTRODUCTION, f"![tokens per second by streams]({plot})\n"]
    parts += [_table(num_streams, list(members)) for num_streams, members in groupby(rows, lambda row: row.num_streams)]
    parts += [LEGEND, "## Conditions\n", "\n".join(conditions.lines()) + "\n"]
    parts += ["## Settings\n", _settings(systems), "## Memory\n", _memory(outcome)]
    if outcome.failures:
        failed = "".join(f"- {name}: {reason}\n" for name, reason in outcome.failures.items())
        parts += ["## Not measured to the end\n", failed]
    return _wrapped("\n".join(parts))


def _wrapped(text: str) -> str:
    """Wrap the items of lists, as tests/test_docs.py has it of every page."""
    fill = partial(textwrap.fill, width=120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return "".join(f"{fill(line) if line.startswith('- ') else line}\n" for line in text.splitlines())


def _table(num_streams: int, rows: Seq[Row]) -> str:
    fastest = max(row.tokens_per_second for row in rows)
    title = "1 stream" if num_streams == 1 else f"{num_streams} streams"
    head = f"## {title}\n\n| | | tokens/s | first p50 / p99 | gap p50 / p99 | own | f32 | peak MB |\n"
    return head + "|---|---|---|---|---|---|---|---|\n" + "".join(_line(row, fastest) for row in rows)


def _line(row: Row, fastest: float) -> str:
    speed = f"{row.tokens_per_second:.1f}"
    speed = f"**{speed}**" if row.tokens_per_second == fastest else speed
    own = "" if row.own_share is None else _percent(row.own_share)
    return (
        f"| {row.system} | {row.mode} | {speed} ({row.lowest:.1f}-{row.highest:.1f}) "
        f"| {row.first_token.p50:.0f} / {row.first_token.p99:.0f} | {row.between.p50:.0f} / {row.between.p99:.0f} "
        f"| {own} | {_percent(row.reference_share)} | {row.peak_mb:.0f} |\n"
    )


def _percent(share: float) -> str:
    """Rounded down: 100% is said of nothing less."""
    return f"{int(1000 * share) / 10:g}%"


def _settings(systems: Seq[System]) -> str:
    settings = dict.fromkeys((system.name, system.settings) for system in systems)
    return "".join(f"- **{name}**: {text}.\n" for name, text in settings)


def _memory(outcome: Outcome) -> str:
    """MB of each process, largest first; modes that one process serves share a line."""
    lines: dict[tuple[str, str], list[str]] = {}
    for (name, mode), peaks in outcome.peaks.items():
        largest = sorted(peaks.items(), key=lambda item: -item[1])
        parts = [f"{process} {size / 1e6:.0f}" for process, size in largest[:NUM_PROCESSES]]
        rest = sum(size for _, size in largest[NUM_PROCESSES:])
        parts += [f"{len(largest) - NUM_PROCESSES} others {rest / 1e6:.0f}"] if rest else []
        lines.setdefault((name, ", ".join(parts)), []).append(mode)
    return "".join(f"- {name}, {' and '.join(modes)}: {parts}\n" for (name, parts), modes in lines.items())


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "processor unknown"
