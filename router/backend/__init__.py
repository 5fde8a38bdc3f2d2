"""The pairs as frontends use them: streams that survive the loss of a pair.

`serve_backend` implements the protocol `Backend` over Ray Serve, `cluster.local.local_service` with one pair alone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Generic, Protocol, TypeVar

from protos.errors import UnavailableError
from protos.messages import GenerateRequest, TokenChunk
from protos.served_model import DraftOrder, DraftReport, ModelCard

Answer = TypeVar("Answer")
OpenStream = Callable[[GenerateRequest], AsyncGenerator[Sequence[TokenChunk], None]]  # as `Backend.generate` does


class SharedAnswer(Generic[Answer]):
    """Computes one answer at a time; callers that arrive during a computation share the next one.

    An answer is therefore never older than its request, and a flood of requests takes a fifth of the time at most.
    """

    def __init__(self, make: Callable[[], Awaitable[Answer]]) -> None:
        self._make = make
        self._turn = asyncio.Lock()
        self._next: asyncio.Task[Answer] | None = None
        self._rest_until_s = 0.0

    async def get(self) -> Answer:
        """Return the answer, or raise the error, that all waiting callers share."""
        if self._next is None:
            self._next = asyncio.create_task(self._in_turn())
        return await asyncio.shield(self._next)  # a caller that gives up must not cancel it for the others

    async def _in_turn(self) -> Answer:
        async with self._turn:
            await asyncio.sleep(self._rest_until_s - time.monotonic())
            self._next = None
            began_s = time.monotonic()
            try:
                return await self._make()
            finally:
                now_s = time.monotonic()
                # Answering takes a fifth of the time at most.
                self._rest_until_s = now_s + min(4 * (now_s - began_s), 1.0)


async def answered(answer: Awaitable[Answer], timeout_s: float = 10.0) -> Answer:
    """Return an answer of the pairs. Raises UnavailableError if it does not come in time."""
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        raise UnavailableError(f"The pairs have not answered within {timeout_s:.0f} s.") from None


class Backend(Protocol):
    """All pairs, seen as one machine."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Sequence[TokenChunk], None]:
        """Yield the chunks of one sequence, one batch per engine step or several; the last has a finish reason.

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
