"""What the pair's shell and its target say to each other: requests one way, one frame per engine step the other."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from engine.proposer.vocab_mapping.counts import TranslationCounts
from engine.stats.engine_stats import EngineStats
from protos import errors
from protos.cache_delta import CacheDelta
from protos.errors import EngineError, ServingError
from protos.messages import GenerateRequest, ModelCard, TokenChunk

TARGET_SOCKET = "target.sock"


class Add(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Generate this; chunks follow until one carries a finish reason."""

    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The client left. Its blocks are free after the running step, and nothing more is sent of it."""

    request_id: str


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks for a `Pong`; they are answered in order, and at once whatever the engine is doing."""


class AskSnapshot(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Asks for a `Snapshot` between two steps."""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The target's first frame: it is loaded, holds no request, and serves this model.

    `epoch` is its start in nanoseconds of wall-clock time: larger after every restart.
    """

    card: ModelCard
    epoch: int = 0


class StepOutput(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Everything one engine step produced, for all requests together."""

    chunks: tuple[TokenChunk, ...]


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine did not take a request; `kind` names a class of `protos.errors`."""

    request_id: str
    kind: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    @classmethod
    def of(cls, request_id: str, error: ServingError) -> Refused:
        return cls(request_id, type(error).__name__, error.message, error.param, error.retry_after_s)

    def error(self) -> ServingError:
        """The error as the engine raised it."""
        kind: type[ServingError] = getattr(errors, self.kind, EngineError)
        return kind(self.message, param=self.param, retry_after_s=self.retry_after_s)


@dataclass(frozen=True, slots=True)
class DraftChannelStats:
    """What the draft channel has lived through; each of these cost speed and nothing else."""

    is_connected: bool = False
    num_connections: int = 0  # draft processes that have greeted
    num_stale_offers: int = 0
    num_missed_offers: int = 0  # wanted, and not there at the deadline
    num_lookups: int = 0  # passes that wanted drafts when the one before was committed
    num_hits: int = 0  # of these, drafts that had been offered ahead
    silent_s: float = 0.0  # how long passes have missed their drafts in vain, idle time left out; 0 once it is heard
    drafting_s: float = 0.0  # the draft model's work, part of it while the target worked too
    channel_s: float = 0.0  # from question to answer less that: both ways, and until the target read it
    translated: TranslationCounts = field(default_factory=TranslationCounts)  # of a draft with its own tokenizer


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The target is alive; its step has run for `step_age_s` (0 between steps), and this is how it stood before it."""

    step_age_s: float
    engine: EngineStats
    draft: DraftChannelStats


class Status(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """How the engine stood at `measured_at_s` (wall clock) between two steps, and what its cache did since the last."""

    measured_at_s: float
    engine: EngineStats
    cache: CacheDelta


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The joined keys of all cached blocks: what every `Status` so far adds up to."""

    keys: bytes


ShellToTarget = Add | Abort | Ping | AskSnapshot
TargetToShell = Ready | StepOutput | Refused | Pong | Status | Snapshot
