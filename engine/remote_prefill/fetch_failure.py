"""Why KV blocks did not come from elsewhere."""

from __future__ import annotations

from enum import StrEnum


class FetchFailure(StrEnum):
    """Every one of them means local prefill of what is missing, and nothing else."""

    LOST = "lost"  # the replica or an object is gone
    TIMEOUT = "timeout"
    MISMATCH = "mismatch"  # another model, dtype, block size or layout
    REFUSED = "refused"  # it cannot be computed there: too long for its pool, or it is full
    GARBLED = "garbled"  # blocks out of order, of the wrong size, or not all of them
