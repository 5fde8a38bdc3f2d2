"""An answer that anyone may request without a key: computed once for all concurrent callers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")

_REST = 4  # pauses after an answer, in multiples of its duration: answering takes a fifth of the time at most
_MAX_PAUSE_S = 1.0


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
                self._rest_until_s = now_s + min(_REST * (now_s - began_s), _MAX_PAUSE_S)
