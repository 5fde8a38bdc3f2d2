"""A worker's load, measured in work instead of requests and pushed to the router on change; a prefix holder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker's load and measured rates, at one moment of its clock.

    Attributes:
        epoch: incremented by the worker's shell for every target that connects; signals of older epochs are ignored.
        measured_at_s: on the receiver's monotonic clock. The router adds the work sent after this moment and subtracts
            the work computed since, so it must be the time of measuring, not of sending.
        queued_prefill_tokens: accepted prompt tokens, not cached and not computed yet, including running
            prefills.
        running_decode_tokens: context tokens of the decoding sequences.
        prefill_tokens_per_s: prefill speed while nothing decodes; 0 until measured.
        decode_slowdown: extra seconds per second of prefill, per running decode token.
        decode_tokens_per_s: committed tokens per second of one running sequence (accepted drafts included); 0 until
            measured.
    """

    worker_id: str
    epoch: int
    measured_at_s: float
    num_waiting_requests: int
    num_running_requests: int
    queued_prefill_tokens: int
    running_decode_tokens: int
    prefill_tokens_per_s: float = 0.0
    decode_slowdown: float = 0.0
    decode_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PrefixHolder:
    """A worker that has reported the first `num_blocks` blocks of a prompt; some may be evicted by now.

    The index names it to another worker.
    """

    worker_id: str
    num_blocks: int
