"""Mooncake's traces (kvcache-ai/Mooncake, FAST'25).

One request per line, prompts as ids of chained 512-token blocks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from bench.simulator.trace import Trace, TraceRequest, sorted_trace, trace_key

BLOCK_SIZE = 512

Record = dict[str, Any]


def is_mooncake(record: Record) -> bool:
    """True if this line is of a Mooncake trace."""
    return "hash_ids" in record and "input_length" in record


def parse_mooncake(name: str, records: Sequence[Record]) -> Trace:
    """Return the trace of these lines.

    `timestamp` is in milliseconds. A partial last block has an id there, but no key here.

    Recorded times are rounded to ticks (3 s in the published files) that a dozen requests share. Each request is put at
    a random moment of its tick, always the same for the same file, so that queues are those of the traffic and not of
    the rounding.
    """
    ordered = sorted(records, key=lambda record: record["timestamp"])
    times_s = [record["timestamp"] / 1000 for record in ordered]
    tick_s = _tick_s(times_s)
    draw = random.Random(0)
    requests = (
        _request(record, time_s + draw.uniform(0.0, tick_s)) for record, time_s in zip(ordered, times_s, strict=True)
    )
    return sorted_trace(name, BLOCK_SIZE, requests)


def _tick_s(times_s: Sequence[float]) -> float:
    """Return the resolution of the recorded times.

    The usual step between different ones, or 0 if few requests share a time.
    """
    steps_s = [after - before for before, after in pairwise(times_s) if after > before]
    if len(steps_s) > len(times_s) / 2:
        return 0.0
    return median(steps_s) if steps_s else 0.0


def _request(record: Record, arrival_s: float) -> TraceRequest:
    num_full = record["input_length"] // BLOCK_SIZE
    return TraceRequest(
        arrival_s=arrival_s,
        session_id="",
        num_tokens=max(record["input_length"], 1),
        num_output_tokens=record["output_length"],
        keys=tuple(trace_key("mooncake", block_id) for block_id in record["hash_ids"][:num_full]),
    )
