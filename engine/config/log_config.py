"""The log of verified positions; its presence in an `EngineConfig` is the operator's consent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PositionLogConfig:
    """A folder that holds at most `max_bytes`, and the share of the requests that go into it, 0 to 1."""

    folder: str
    max_bytes: int
    share: float
