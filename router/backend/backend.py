"""The pairs as the frontends see them.

`router.backend.serve_backend` implements the protocol over Ray Serve, tests with a fake.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from protos.messages import GenerateRequest, ModelCard, TokenChunk
from protos.served_draft import DraftOrder, DraftReport


class Backend(Protocol):
    """All pairs, as one machine that turns token ids into token ids."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Sequence[TokenChunk], None]:
        """Yield the chunks of one sequence, those of one or more engine steps together; the last has a finish reason.

        Closing the generator early aborts the sequence.

        Raises:
            OverloadedError: before the first chunk; the request was not accepted.
            UnavailableError: at any time; the pair was lost.
            ServingError: others, as the pair raised them.
        """
        ...

    async def describe(self) -> ModelCard:
        """Return the card of the model that is served. Raises `UnavailableError` while no pair answers."""
        ...

    async def kill_drafts(self) -> int:
        """Kill the draft's process of every pair that has one, as a fault would; return their number."""
        ...

    async def order_drafts(self, order: DraftOrder) -> Sequence[DraftReport]:
        """Carry out an order about the draft of every pair; return the drafts that run then.

        Raises:
            ServingError: a pair's own; the others may have carried the order out.
        """
        ...

    async def metrics_texts(self) -> Sequence[str]:
        """Return the Prometheus text of every live pair replica."""
        ...
