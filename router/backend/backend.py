"""The interface between the frontends and the pairs.

`router.backend.serve_backend` implements the protocol over Ray Serve; tests use a fake.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from protos.messages import GenerateRequest, ModelCard, TokenChunk
from protos.served_draft import DraftOrder, DraftReport


class TokenStreams(Protocol):
    """The part of a `Backend` that turns token ids into token ids."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Sequence[TokenChunk], None]:
        """Yield the chunks of one sequence, one batch per engine step or several; the last has a finish reason.

        Closing the generator early aborts the sequence.

        Raises:
            OverloadedError: before the first chunk; the request was not accepted.
            UnavailableError: at any time; the pair was lost.
            ServingError: others, as the pair raised them.
        """
        ...


class Backend(TokenStreams, Protocol):
    """All pairs, seen as one machine."""

    async def describe(self) -> ModelCard:
        """Return the card of the model that is served. Raises `UnavailableError` while no pair answers."""
        ...

    async def kill_drafts(self) -> int:
        """Kill the draft process of every pair that has one, to simulate a fault; return their number."""
        ...

    async def order_drafts(self, order: DraftOrder) -> Sequence[DraftReport]:
        """Apply an order about the draft to every pair; return the drafts that run afterwards.

        Raises:
            ServingError: a pair's error; other pairs may have applied the order.
        """
        ...

    async def metrics_texts(self) -> Sequence[str]:
        """Return the Prometheus text of every live pair replica."""
        ...
