"""The protocol of a system: a way to serve the pair, alive from `start` to `close`, with one contender per mode."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from bench.contenders.contender import Contender


class Mode(StrEnum):
    """Plain decoding, or with the draft model."""

    PLAIN = "plain"
    DRAFT = "with draft"


class Precision(StrEnum):
    """The precision of weights as they are multiplied, of activations, and of keys and values."""

    BF16 = "bf16"
    F32 = "f32"
    INT8 = "int8"  # the weights; all else as the system rounds it beside such weights on this processor
    INT4 = "int4"

    @property
    def is_quantized(self) -> bool:
        return self in (Precision.INT8, Precision.INT4)

    @property
    def dtype(self) -> str:
        """Ours: of integers float32 on processors that compute no bfloat16."""
        return {Precision.F32: "float32", Precision.BF16: "bfloat16"}.get(self, "auto")


@dataclass(frozen=True, slots=True)
class Pair:
    """One half each of a pair, in the form that a system reads; without a draft Outrider's target drafts for itself."""

    target: Path
    draft: Path | None

    @property
    def modes(self) -> list[Mode]:
        """The modes of a system that wants a model to draft."""
        return list(Mode) if self.draft else [Mode.PLAIN]


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of all systems; a process that lives longer than `deadline_s` is killed."""

    num_threads: int
    num_draft_tokens: int
    max_streams: int
    max_context: int
    deadline_s: float


class System(Protocol):
    """A system under test, with its names and settings.

    `peer` is the choice of --peers, `name` is for tables: peer and precision. Modes that need processes of their own
    are systems of their own, with the same name. `settings` are for the page.
    """

    peer: str
    name: str
    settings: str

    def start(self) -> dict[Mode, Contender]:
        """Start its processes, and returns when they are ready to run. Raises RuntimeError when they are not."""

    def peak_bytes(self) -> dict[str, int]:
        """Return the most memory that each of its processes has taken, by name."""

    def close(self) -> None:
        """End its processes; twice is fine, and so is before `start`."""
