"""The chained key of each full KV block, and a worker's reports of its blocks and load to the router's index.

Equal keys mean equal tokens, equal prefix, equal salt and equal model. The ingress and the engine both call
`block_keys`, so a router's prediction and a worker's cache agree on the blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

BlockKey = bytes  # 16 bytes
_DIGEST_BYTES = 16
PROBE_SALT = "outrider"


@dataclass(frozen=True, slots=True)
class CacheDelta:
    """The net change of one worker's prefix cache, over one call of its block manager or over many steps.

    Apply it in this order: clear if `is_cleared`, then drop `removed`, then add `stored`. No key is in both.

    Attributes:
        stored: joined keys (`join_keys`) of full blocks that can be reused from now on.
        removed: joined keys of blocks whose memory was reused for other tokens.
        is_cleared: all earlier blocks are invalid (weights changed, or the cache was reset).
    """

    stored: bytes = b""
    removed: bytes = b""
    is_cleared: bool = False

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed or self.is_cleared)


def root_key(model_version: str, salt: str = "") -> BlockKey:
    """Return the key before the first block: different salts or versions of a model never share a block."""
    return blake2b(f"{model_version}\0{salt}".encode(), digest_size=_DIGEST_BYTES).digest()


def child_key(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """Return the key of the full block `token_ids` after the prefix with key `parent`."""
    return blake2b(parent + array("i", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()


def block_keys(token_ids: Sequence[int], block_size: int, root: BlockKey) -> list[BlockKey]:
    """Return the keys of all full blocks of `token_ids`, first to last; a partial last block has none."""
    keys = []
    parent = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = child_key(parent, token_ids[start : start + block_size])
        keys.append(parent)
    return keys


def probe_token_ids(block_size: int) -> tuple[int, ...]:
    """Return two blocks of a fixed text: equal keys of the second, under `PROBE_SALT`, prove that processes agree."""
    return tuple(range(7, 7 + 2 * block_size))


def join_keys(keys: Iterable[BlockKey]) -> bytes:
    """Join keys for sending: one object instead of thousands."""
    return b"".join(keys)


def split_keys(joined: bytes) -> tuple[BlockKey, ...]:
    """Split keys that `join_keys` has joined."""
    return tuple([joined[start : start + _DIGEST_BYTES] for start in range(0, len(joined), _DIGEST_BYTES)])


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
