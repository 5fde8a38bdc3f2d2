"""A worker's load, in work and not in requests, pushed to the router whenever it changes; and the prefix it holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """One worker's load and its own measured rates, at one moment of its clock.

    Attributes:
        epoch: counted by the worker's shell, one more for every target that greets; a signal of an older one is
            ignored.
        measured_at_s: on the reader's monotonic clock. The router adds what it sent after this moment and subtracts
            what the worker has computed since, so it must be the moment of measuring, not of sending.
        queued_prefill_tokens: prompt tokens accepted, not cached and not yet computed, those of running prefills
            included.
        running_decode_tokens: context tokens of the sequences that decode now.
        prefill_tokens_per_s: prefill speed with nothing decoding; 0 until it is measured.
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
