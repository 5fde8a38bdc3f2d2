"""Several streams read as one, and ended as one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from router.generation.generation import fan_in


class Source:
    """Yields numbers, then raises `error` if there is one; records that it was closed."""

    def __init__(self, numbers: list[int], error: Exception | None = None) -> None:
        self.numbers = numbers
        self.error = error
        self.is_closed = False

    async def items(self) -> AsyncGenerator[int, None]:
        try:
            for number in self.numbers:
                await asyncio.sleep(0)
                yield number
            if self.error is not None:
                raise self.error
        finally:
            self.is_closed = True


@pytest.mark.parametrize("num_sources", [1, 3])
async def test_every_item_comes_and_each_stream_keeps_its_order(num_sources: int) -> None:
    sources = [Source([10 * rank + step for step in range(5)]) for rank in range(num_sources)]
    items = [item async for item in fan_in([source.items() for source in sources])]
    assert sorted(items) == sorted(number for source in sources for number in source.numbers)
    for rank, source in enumerate(sources):
        assert [item for item in items if item // 10 == rank] == source.numbers


@pytest.mark.parametrize("num_others", [0, 2])
async def test_one_error_ends_all_streams(num_others: int) -> None:
    failing = Source([1], ValueError("bad"))
    others = [Source(list(range(1000))) for _ in range(num_others)]
    with pytest.raises(ValueError, match="bad"):
        async for _ in fan_in([source.items() for source in (failing, *others)]):
            pass
    assert all(source.is_closed for source in (failing, *others))


@pytest.mark.parametrize("num_sources", [1, 3])
async def test_closing_the_merged_stream_closes_all_even_those_held_back(num_sources: int) -> None:
    sources = [Source(list(range(1000))) for _ in range(num_sources)]
    async with aclosing(fan_in([source.items() for source in sources])) as merged:
        await anext(merged)
        await asyncio.sleep(0.05)
    assert all(source.is_closed for source in sources)
