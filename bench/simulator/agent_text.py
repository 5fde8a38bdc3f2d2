"""Agent calls with their real text (LMCache/lmcache-agent-trace): one call per line, prompt and answer as strings.

Text becomes tokens at four characters each, a usual figure for English and code, so no tokenizer is needed; the cut is
the same for every prompt, so equal prefixes stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.simulator.trace import Trace, TraceRequest, sorted_trace
from protos.block_keys import block_keys, root_key

BLOCK_SIZE = 64
CHARS_PER_TOKEN = 4

Record = dict[str, Any]


def is_agent_text(record: Record) -> bool:
    """True if this line is one call of such a trace."""
    return "input" in record and "timestamp" in record


def parse_agent_text(name: str, records: Sequence[Record]) -> Trace:
    """Return the trace of these lines; `timestamp` is in microseconds."""
    return sorted_trace(name, BLOCK_SIZE, (_request(record) for record in records))


def _request(record: Record) -> TraceRequest:
    codepoints = [ord(character) for character in record["input"]]
    return TraceRequest(
        arrival_s=record["timestamp"] / 1e6,
        session_id=record.get("session_id", ""),
        num_tokens=max(len(codepoints) // CHARS_PER_TOKEN, 1),
        num_output_tokens=max(len(record.get("output", "")) // CHARS_PER_TOKEN, 1),
        keys=tuple(block_keys(codepoints, BLOCK_SIZE * CHARS_PER_TOKEN, root_key("agent-text"))),
    )
