"""The chained key of each full KV block: equal keys mean equal tokens, equal prefix, equal salt and equal model.

The ingress and the engine both call `block_keys`, so a router's prediction and a worker's cache agree on the blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b


@dataclass(frozen=True, slots=True)
class CacheDelta:
    """The net change of one worker's prefix cache, over one call of its block manager or over many steps.

    Apply it in this order: clear if `is_cleared`, then drop `removed`, then add `stored`. No key is in both.

    Attributes:
        stored: joined keys (`protos.block_keys.join_keys`) of full blocks that can be reused from now on.
        removed: joined keys of blocks whose memory was reused for other tokens.
        is_cleared: all earlier blocks are invalid (weights changed, or the cache was reset).
    """

    stored: bytes = b""
    removed: bytes = b""
    is_cleared: bool = False

    def __bool__(self) -> bool:
        return bool(self.stored or self.removed or self.is_cleared)


BlockKey = bytes  # 16 bytes

_DIGEST_BYTES = 16

PROBE_SALT = "outrider"


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
