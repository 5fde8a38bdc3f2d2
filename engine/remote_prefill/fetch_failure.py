"""Causes for which KV blocks do not come from a prefill replica."""

from __future__ import annotations

from enum import StrEnum


class FetchFailure(StrEnum):
    """The cause of a failed fetch; its only consequence is local prefill of the missing tokens."""

    LOST = "lost"  # the replica or an object is gone
    TIMEOUT = "timeout"
    MISMATCH = "mismatch"  # another model, dtype, block size or layout
    REFUSED = "refused"  # the replica cannot compute it: too long for its pool, or the pool is full
    GARBLED = "garbled"  # blocks out of order, of the wrong size, or not all of them
