"""Reads a trace from disk, whatever its format."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.simulator.agent_text import is_agent_text, parse_agent_text
from bench.simulator.claude_code import is_claude_code, parse_claude_code
from bench.simulator.mooncake import is_mooncake, parse_mooncake
from bench.simulator.trace import Trace

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """One kind of trace: its recognition by the first line, and its reader."""

    name: str
    is_mine: Callable[[Record], bool]
    parse: Callable[[str, Sequence[Record]], Trace]


FORMATS = (
    TraceFormat("Mooncake (hash_ids, input_length, timestamp)", is_mooncake, parse_mooncake),
    TraceFormat("coding-agent sessions (requests, block_size)", is_claude_code, parse_claude_code),
    TraceFormat("agent text (input, timestamp)", is_agent_text, parse_agent_text),
)

_UNFIT = (KeyError, TypeError, ValueError, AttributeError, ArithmeticError)  # what a parser makes of odd records


class TraceError(ValueError):
    """The file is not a trace that the simulator can read."""


def read_trace(path: Path, num_lines: int | None = None) -> Trace:
    """Read a `.jsonl` or `.jsonl.gz` trace, or its first `num_lines` lines (requests, or whole sessions).

    Raises:
        TraceError: no line, a line that is not JSON, a format that is not one of `FORMATS`, or a record that is not as
            its format has it; or all requests come at once, so that no speed of replay gives a load.
    """
    records = read_lines(path, num_lines)
    for trace_format in FORMATS:
        if trace_format.is_mine(records[0]):
            return _parse(path, trace_format, records)
    known = "; ".join(trace_format.name for trace_format in FORMATS)
    raise TraceError(f"{path}: unknown trace format with fields {sorted(records[0])}; known are: {known}")


def _parse(path: Path, trace_format: TraceFormat, records: Sequence[Record]) -> Trace:
    try:
        trace = trace_format.parse(path.name, records)
    except _UNFIT as error:
        raise TraceError(f"{path}: {_first_unfit(trace_format, records) or error}") from error
    if trace.span_s <= 0:
        raise TraceError(
            f"{path}: its {len(trace.requests)} requests all come at one moment; a load needs a span of time"
        )
    return trace


def _first_unfit(trace_format: TraceFormat, records: Sequence[Record]) -> str | None:
    """Return the fault of the first record that cannot be read alone; None if each of them can."""
    for number, record in enumerate(records, start=1):
        try:
            trace_format.parse("", [record])
        except KeyError as error:
            return f"record {number} lacks the field {error} of {trace_format.name}"
        except _UNFIT as error:
            return f"record {number} is not one of {trace_format.name}: {error}"
    return None


def read_lines(path: Path, num_lines: int | None = None) -> list[Record]:
    """Return the objects of a `.jsonl` or `.jsonl.gz` file, or of its first lines. Raises TraceError."""
    opener = gzip.open if path.suffix == ".gz" else open
    records: list[Record] = []
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if num_lines is not None and len(records) == num_lines:
                    break
                if line.strip():
                    records.append(_parse_line(path, number, line))
    except (EOFError, UnicodeDecodeError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path}: broken behind {len(records)} records ({error})") from error
    if not records:
        raise TraceError(f"{path}: the trace has no line")
    return records


def _parse_line(path: Path, number: int, line: str) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{path}, line {number}: not JSON ({error})") from error
    if not isinstance(record, dict):
        raise TraceError(f"{path}, line {number}: a {type(record).__name__} where an object was expected")
    return record
