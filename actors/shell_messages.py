"""What the pair's shell and its target say to each other: requests one way, one frame per engine step the other."""

from __future__ import annotations

import msgspec

from protos import errors
from protos.errors import EngineError, ServingError
from protos.messages import GenerateRequest, TokenChunk


class _Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base: an array whose first item names the message, so that a union of them decodes in one pass."""


class Add(_Message):
    """Generate this; chunks follow until one carries a finish reason."""

    request: GenerateRequest


class Abort(_Message):
    """The client left. Its blocks are free after the running step; no further chunk is awaited."""

    request_id: str


class Ping(_Message):
    """Answered at once by the target's reader thread, whatever the engine is doing."""


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's gauges and running sums, as they were after a step."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache
    num_queried_tokens: int = 0  # prompt tokens looked up there
    num_computed_prompt_tokens: int = 0
    num_steps: int = 0
    num_invalid_drafts: int = 0  # offers with impossible content
    num_stale_offers: int = 0
    num_missed_offers: int = 0  # drafts that were wanted and not there at the deadline
    is_draft_connected: bool = False


class StepOutput(_Message):
    """Everything one engine step produced, for all requests together."""

    chunks: tuple[TokenChunk, ...]
    stats: EngineStats


class Refused(_Message):
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
        kind = getattr(errors, self.kind, EngineError)
        return kind(self.message, param=self.param, retry_after_s=self.retry_after_s)


class Pong(_Message):
    """The target is alive; its current step has run for `step_age_s` (0 when it waits for work)."""

    step_age_s: float
    stats: EngineStats


ToTarget = Add | Abort | Ping
ToShell = StepOutput | Refused | Pong
