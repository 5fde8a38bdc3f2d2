"""The change of a prefix cache, as the block manager sends it to the router's index."""

from __future__ import annotations

from dataclasses import dataclass


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
