"""An answer is made once for all who wait, is never older than its question, and takes a part of the time at most."""

from __future__ import annotations

import asyncio
import time

import pytest

from protos.errors import UnavailableError
from router.backend import SharedAnswer


class AnswerSource:
    """Answers with the number of times that it was asked, each after `took_s`."""

    def __init__(self, took_s: float = 0.02) -> None:
        self.num_asked = 0
        self.took_s = took_s
        self.error: Exception | None = None

    async def read(self) -> int:
        self.num_asked += 1
        number = self.num_asked
        await asyncio.sleep(self.took_s)
        if self.error is not None:
            raise self.error
        return number


async def test_all_who_ask_at_a_time_share_one_answer() -> None:
    source = AnswerSource()
    shared = SharedAnswer(source.read)
    assert await asyncio.gather(*(shared.get() for _ in range(1000))) == [1] * 1000


async def test_one_who_asks_while_an_answer_is_made_gets_the_next() -> None:
    source = AnswerSource()
    shared = SharedAnswer(source.read)
    first = asyncio.create_task(shared.get())
    await asyncio.sleep(source.took_s / 2)
    assert await asyncio.gather(shared.get(), shared.get()) == [2, 2]
    assert await first == 1


async def test_a_flood_takes_a_fifth_of_the_time() -> None:
    source = AnswerSource(0.01)
    shared = SharedAnswer(source.read)
    began_s = time.monotonic()
    while time.monotonic() - began_s < 0.5:
        await shared.get()
    assert 2 <= source.num_asked <= 11


async def test_an_error_is_everybody_s_and_the_next_answer_is_made_anew() -> None:
    source = AnswerSource()
    source.error = UnavailableError("gone")
    shared = SharedAnswer(source.read)
    outcomes = await asyncio.gather(shared.get(), shared.get(), return_exceptions=True)
    assert outcomes == [source.error] * 2
    source.error = None
    assert await shared.get() == 2


async def test_one_who_gives_up_leaves_the_answer_to_the_others() -> None:
    source = AnswerSource()
    shared = SharedAnswer(source.read)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(source.took_s / 4):
            await shared.get()
    other = asyncio.create_task(shared.get())
    assert await other == 2
