"""The chained name of each full KV block: equal keys mean equal tokens, equal prefix, equal salt and equal model.

The ingress and the engine both call `block_keys`, so a router's prediction and a worker's cache speak of the same
blocks.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

BlockKey = bytes  # 16 bytes

_DIGEST_BYTES = 16


def root_key(model_version: str, salt: str = "") -> BlockKey:
    """Key before the first block: different salts, and different versions of a model, never share a block."""
    return blake2b(f"{model_version}\0{salt}".encode(), digest_size=_DIGEST_BYTES).digest()


def child_key(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """Key of the full block `token_ids` whose prefix is named by `parent`."""
    return blake2b(parent + array("i", token_ids).tobytes(), digest_size=_DIGEST_BYTES).digest()


def block_keys(token_ids: Sequence[int], block_size: int, root: BlockKey) -> list[BlockKey]:
    """Keys of all full blocks of `token_ids`, first to last; a partial last block has none."""
    keys = []
    parent = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = child_key(parent, token_ids[start : start + block_size])
        keys.append(parent)
    return keys
