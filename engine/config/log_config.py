"""The log of verified positions. An operator consents to it by setting it in an `EngineConfig`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PositionLogConfig:
    """A folder of at most `max_bytes`."""

    folder: str
    max_bytes: int
