"""The message of a worker to the router's index: what changed in its prefix cache, and how busy it is."""

from __future__ import annotations

from dataclasses import dataclass

from protos.block_keys import CacheDelta


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


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Sent when something has changed, and once a second when nothing has.

    Attributes:
        load: carries the worker's id and epoch.
        load_age_s: age of `load` when this is sent, on the worker's clock, whose time means nothing on other nodes.
        is_serving: False while the worker is up and its target is not.
        sequence: counts the reports of an epoch from 0 without holes, so that a lost one shows.
        snapshot: joined keys of the whole cache; None where the index has not asked for it.
        deltas: changes since the last report, and after the snapshot if there is one; oldest first.
    """

    load: WorkerLoad
    load_age_s: float
    is_serving: bool
    sequence: int
    snapshot: bytes | None = None
    deltas: tuple[CacheDelta, ...] = ()
