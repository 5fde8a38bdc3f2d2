"""The results so far: saved after every line, printed as tables at the end, with the reasons for gaps."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

NOT_MEASURED = "not measured"


@dataclass(frozen=True, slots=True)
class KernelLine:
    """One attention launch over all layers' pools: bytes it read per second, and their share of the bandwidth."""

    kv_dtype: str
    batch: int
    context: int
    rows: int
    gigabytes_per_s: float
    share_of_bandwidth: float


@dataclass(frozen=True, slots=True)
class EngineLine:
    """Decoding of `batch` sequences after `context` tokens; times are of a step, medians, in milliseconds.

    `device_ms` is the target's forward alone, back to back; the rest of a step, except the drafts' time, is the
    host's gap (sampling on the device counts as gap).
    """

    mode: str
    batch: int
    context: int
    tokens_per_s: float
    tokens_per_pass: float
    step_ms: float
    floor_ms: float
    device_ms: float
    draft_ms: float

    @property
    def over_floor(self) -> float:
        return self.step_ms / self.floor_ms if self.floor_ms else 0.0

    @property
    def host_gap(self) -> float:
        return max(0.0, self.step_ms - self.draft_ms - self.device_ms) / self.step_ms


@dataclass(frozen=True, slots=True)
class Missing:
    """A line that could not be measured, and why."""

    section: str
    name: str
    reason: str


Line = KernelLine | EngineLine | Missing


class GpuResults:
    """Lines in the order of their measurement, and facts about the machine; every change is on disk at once."""

    def __init__(self, file: Path) -> None:
        self.facts: dict[str, str] = {}
        self.lines: list[Line] = []
        self._file = file

    def note(self, **facts: str) -> None:
        self.facts.update(facts)
        self._save()

    def add(self, line: Line) -> None:
        self.lines.append(line)
        self._save()

    def attempt(self, section: str, name: str, measure: Callable[[], None]) -> None:
        """Measure; a failure costs its own lines, is logged, and named in the table."""
        try:
            measure()
        except Exception as error:
            logger.exception("%s: %s failed", section, name)
            self.add(Missing(section, name, f"failed: {type(error).__name__}: {str(error)[:200]}"))

    def text(self) -> str:
        """Everything, as Markdown."""
        facts = [f"- {name.replace('_', ' ')}: {value}" for name, value in self.facts.items()]
        missing = [line for line in self.lines if isinstance(line, Missing)]
        parts = ["\n".join(facts), self._kernel_table(), self._engine_table()]
        parts += ["\n".join(f"- {line.section}, {line.name}: {line.reason}" for line in missing)]
        return "\n\n".join(part for part in parts if part)

    def _kernel_table(self) -> str:
        rows = [
            [*_kernel_case(line), f"{line.gigabytes_per_s:,.0f}", f"{line.share_of_bandwidth:.0%}"]
            for line in self.lines
            if isinstance(line, KernelLine)
        ]
        return _table(["attention, KV in", "batch", "context", "rows", "GB/s", "of bandwidth"], rows)

    def _engine_table(self) -> str:
        lines = [line for line in self.lines if isinstance(line, EngineLine)]
        plain = {(line.batch, line.context): line.tokens_per_s for line in lines if line.mode == "plain"}
        rows = [_engine_row(line, plain.get((line.batch, line.context))) for line in lines]
        columns = ["mode", "batch", "context", "tokens/s", "over plain", "tokens/pass", "step ms", "floor ms"]
        return _table([*columns, "over floor", "drafts ms", "host gap"], rows)

    def _save(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        saved = {"facts": self.facts, "lines": [{"kind": type(line).__name__, **asdict(line)} for line in self.lines]}
        self._file.write_text(json.dumps(saved, indent=1) + "\n")
        self._file.with_suffix(".md").write_text(self.text() + "\n")


def _kernel_case(line: KernelLine) -> list[object]:
    return [line.kv_dtype, line.batch, line.context, line.rows]


def _engine_row(line: EngineLine, plain: float | None) -> list[object]:
    return [
        line.mode,
        line.batch,
        line.context,
        f"{line.tokens_per_s:,.0f}",
        "-" if plain is None else f"{line.tokens_per_s / plain:.2f}",
        f"{line.tokens_per_pass:.2f}",
        f"{line.step_ms:.2f}",
        f"{line.floor_ms:.2f}",
        f"{line.over_floor:.2f}",
        f"{line.draft_ms:.2f}",
        f"{line.host_gap:.0%}",
    ]


def _table(columns: Seq[str], rows: Seq[Seq[object]]) -> str:
    body = rows or [[NOT_MEASURED, *[""] * (len(columns) - 1)]]
    lines = [columns, ["---"] * len(columns), *body]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
