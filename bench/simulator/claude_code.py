"""Coding-agent sessions (callanjfox/kv-cache-tester): prompts as runs of 64-token block ids, local to a session.

Eight blocks become one key: agent prompts are long (about 150,000 tokens), and their hit rate loses 0.2% by it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from bench.simulator.trace import Trace, TraceRequest, sorted_trace
from protos.block_keys import BlockKey, child_key, root_key

BLOCKS_PER_KEY = 8
LONGEST_PAUSE_S = 300.0

Record = dict[str, Any]


def is_claude_code(record: Record) -> bool:
    """True if this line is one session of such a trace."""
    return "requests" in record and "block_size" in record


def parse_claude_code(name: str, sessions: Sequence[Record]) -> Trace:
    """Return all sessions on one time line.

    Pauses of more than `LONGEST_PAUSE_S` are cut to that: some sessions were left for days. The file counts a session's
    times from its own start and has no date for it: starts are drawn evenly over the length of the longest
    session, always the same for the same file. A subagent is a session of its own, beside its parent.
    """
    block_size = sessions[0]["block_size"]
    recorded = [list(_requests(session, session["id"], 0.0, block_size)) for session in sessions]
    parsed = [_without_long_pauses(requests) for requests in recorded if requests]
    if not parsed:
        raise ValueError("no session has a request")
    span_s = max(requests[-1].arrival_s for requests in parsed)
    draw = random.Random(0)
    starts_s = [draw.uniform(0.0, span_s) for _ in parsed]
    moved = (
        replace(request, arrival_s=start_s + request.arrival_s)
        for start_s, requests in zip(starts_s, parsed, strict=True)
        for request in requests
    )
    return sorted_trace(name, block_size * BLOCKS_PER_KEY, moved)


def _requests(session: Record, session_id: str, start_s: float, block_size: int) -> Iterator[TraceRequest]:
    """Return the session's requests and those of its subagents, which count their times from their own start."""
    root = root_key("claude-code", session_id.split("/")[0])
    for number, record in enumerate(session["requests"]):
        if "requests" in record:
            yield from _requests(record, f"{session_id}/{number}", start_s + record["t"], block_size)
        else:
            yield TraceRequest(
                arrival_s=start_s + record["t"],
                session_id=session_id,
                num_tokens=max(record["in"], 1),
                num_output_tokens=record["out"],
                keys=tuple(_keys(record["runs"], record["in"] // block_size, root)),
            )


def _without_long_pauses(requests: list[TraceRequest]) -> list[TraceRequest]:
    """Return the requests in order of arrival, none more than `LONGEST_PAUSE_S` after the one before."""
    ordered = sorted(requests, key=lambda request: request.arrival_s)
    shortened = []
    cut_s = 0.0
    for before, request in pairwise([ordered[0], *ordered]):
        cut_s += max(request.arrival_s - before.arrival_s - LONGEST_PAUSE_S, 0.0)
        shortened.append(replace(request, arrival_s=request.arrival_s - cut_s))
    return shortened


def _keys(runs: Sequence[Sequence[int]], num_full_blocks: int, root: BlockKey) -> Iterator[BlockKey]:
    """Chained keys of each eight blocks; a rest of fewer, or a partial last block, has none."""
    block_ids = [block_id for first, length in runs for block_id in range(first, first + length)][:num_full_blocks]
    parent = root
    for start in range(0, len(block_ids) - BLOCKS_PER_KEY + 1, BLOCKS_PER_KEY):
        parent = child_key(parent, block_ids[start : start + BLOCKS_PER_KEY])
        yield parent
