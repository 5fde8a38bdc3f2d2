"""Streams that can be closed, and several of them read as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from contextlib import aclosing
from typing import Protocol, TypeVar

Item = TypeVar("Item")
Item_co = TypeVar("Item_co", covariant=True)

_MAX_PENDING = 64  # a client that reads slowly holds the streams back, not the memory


class ClosableStream(AsyncIterable[Item_co], Protocol[Item_co]):
    """An asynchronous iterable that can be closed early, as async generators can."""

    async def aclose(self) -> None: ...


async def fan_in(streams: Sequence[ClosableStream[Item]]) -> AsyncGenerator[Item, None]:
    """Yield the items of all streams as they come. The first error ends all of them; closing closes all of them."""
    queue: asyncio.Queue[Item | _End] = asyncio.Queue(_MAX_PENDING)
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    num_open = len(tasks)
    try:
        while num_open:
            received = await queue.get()
            if isinstance(received, _End):
                received.raise_error()
                num_open -= 1
            else:
                yield received
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def leading(stream: AsyncGenerator[Item, None], has_begun: asyncio.Event) -> AsyncGenerator[Item, None]:
    """Yield the items of a stream, and set the event at the first."""
    async with aclosing(stream):
        async for item in stream:
            has_begun.set()
            yield item


async def following(stream: AsyncGenerator[Item, None], may_begin: asyncio.Event) -> AsyncGenerator[Item, None]:
    """Yield the items of a stream that begins at the event."""
    async with aclosing(stream):
        await may_begin.wait()
        async for item in stream:
            yield item


class _End:
    """The end of one stream, and the error that ended it."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error


async def _pump(stream: ClosableStream[Item], queue: asyncio.Queue[Item | _End]) -> None:
    async with aclosing(stream):
        try:
            async for item in stream:
                await queue.put(item)
        except Exception as error:  # the reader raises it
            await queue.put(_End(error))
        else:
            await queue.put(_End())
