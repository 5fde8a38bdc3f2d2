"""Reasons why a prefill replica does not deliver KV blocks."""

from __future__ import annotations

from enum import StrEnum


class FetchFailure(StrEnum):
    """The cause of a failed fetch; the engine then computes the missing tokens itself."""

    LOST = "lost"  # the replica or an object is gone
    TIMEOUT = "timeout"
    MISMATCH = "mismatch"  # another model, dtype, block size or layout
    REFUSED = "refused"  # the replica cannot compute it: too long for its pool, or the pool is full
    GARBLED = "garbled"  # blocks are out of order, of the wrong size, or missing
