"""Several streams read as one, each item as soon as it is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")

_MAX_PENDING = 64  # a client that reads slowly holds the streams back, not the memory


async def fan_in(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Yields the items of all streams as they come. The first error ends all of them; closing closes all of them."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield item
        return
    queue: asyncio.Queue[Item | _End] = asyncio.Queue(_MAX_PENDING)
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    try:
        num_open = len(tasks)
        while num_open:
            received = await queue.get()
            if not isinstance(received, _End):
                yield received
            elif received.error is not None:
                raise received.error
            else:
                num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _End:
    """Says that one stream is over, and why."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error


async def _pump(stream: AsyncGenerator[Item, None], queue: asyncio.Queue[Item | _End]) -> None:
    async with aclosing(stream):
        try:
            async for item in stream:
                await queue.put(item)
        except Exception as error:  # handed to the reader, who raises it
            await queue.put(_End(error))
        else:
            await queue.put(_End())
