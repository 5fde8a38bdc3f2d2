"""The messages between a pair's shell and its target: requests one way, one frame per engine step the other."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from engine.accounting.engine_stats import EngineStats, TranslationCounts
from protos import errors
from protos.block_keys import CacheDelta
from protos.errors import EngineError, ServingError
from protos.messages import GenerateRequest, TokenChunk
from protos.served_model import ModelCard

TARGET_SOCKET = "target.sock"


class Add(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Starts a request. Chunks follow until one has a finish reason."""

    request: GenerateRequest


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Ends a request. Its blocks are freed after the running step, and no chunk follows."""

    request_id: str


class Ping(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Requests a `Pong`. Pings are answered in order, and at once even during a step."""


class AskSnapshot(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Requests a `Snapshot` between two steps."""


class OrderHead(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Loads the head at `path` next to the present one, and exchanges them between two steps unless it `is_check`.

    A `HeadAnswer` answers.
    """

    order_id: int
    path: str
    is_check: bool = False


class TargetReady(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The target's first frame: it is loaded, has no requests, and serves this model."""

    card: ModelCard


class StepOutput(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The output of one engine step, for all requests."""

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
        """Rebuild the error that the engine raised."""
        kind: type[ServingError] = getattr(errors, self.kind, EngineError)
        return kind(self.message, param=self.param, retry_after_s=self.retry_after_s)


class HeadAnswer(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """An order about a head was carried out, or refused."""

    order_id: int
    digest: str = ""
    refusal: Refused | None = None


@dataclass(slots=True)
class DraftChannelStats:
    """The counters of a draft's channel. Each event costs speed, and never a token."""

    is_connected: bool = False
    num_connections: int = 0  # draft processes that have connected
    num_stale_offers: int = 0
    num_missed_offers: int = 0  # requested, and not there at the deadline
    num_lookups: int = 0  # passes that wanted drafts when the pass before was committed
    num_hits: int = 0  # lookups whose drafts were offered ahead
    silent_s: float = 0.0  # passes without a reply, without idle time; 0 after a reply
    drafting_s: float = 0.0  # the draft model's work, partly in parallel with the target's
    channel_s: float = 0.0  # from request to reply, without the drafting
    translated: TranslationCounts = field(default_factory=TranslationCounts)  # of a draft with its own tokenizer


class HeadFailure(msgspec.Struct, frozen=True, array_like=True):
    """A head that the target has left by itself."""

    path: str
    reason: str


class RunningHead(msgspec.Struct, frozen=True, array_like=True):
    """The head that drafts, and a head that failed and that it has replaced without an order."""

    path: str
    digest: str
    failure: HeadFailure | None = None


class Pong(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The target is alive. It has made no progress for `stalled_s`; the numbers are from before its step."""

    stalled_s: float
    engine: EngineStats
    drafts: dict[str, DraftChannelStats]  # of each draft model, by its method
    head: RunningHead | None = None  # if it can be exchanged


class Status(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The engine's numbers at `measured_at_s` of the node's monotonic clock, and the changes of its cache."""

    measured_at_s: float
    engine: EngineStats
    cache: CacheDelta


class Snapshot(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The joined keys of all cached blocks, which is the sum of every `Status` so far."""

    keys: bytes


ShellToTarget = Add | Abort | Ping | AskSnapshot | OrderHead
TargetToShell = TargetReady | StepOutput | Refused | Pong | Status | Snapshot | HeadAnswer
