"""The base of every request body, JSON texts inside one, and the thread that long bodies are read in."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from pydantic import BaseModel, ConfigDict

from protos.errors import RequestError
from protos.json_parts import check_parts

Result = TypeVar("Result")

SMALL_BYTES = 1 << 14  # of a body: its work takes a few milliseconds, whatever it holds


class Body(BaseModel):
    """A body whose JSON types are taken as they are; numbers must be finite, unknown names are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True, protected_namespaces=())


class BodyWork:
    """Runs work on a small body at once, and on a large one in a worker thread.

    One large body at a time: a worker thread shares the interpreter lock with the event loop, and several would make
    it wait for each.
    """

    def __init__(self) -> None:
        self._turn = asyncio.Semaphore(1)

    async def run(self, num_bytes: int, work: Callable[[], Result]) -> Result:
        """Return the result of `work` on a body of `num_bytes`."""
        if num_bytes <= SMALL_BYTES:
            return work()
        async with self._turn:
            with _no_collection():
                return await asyncio.to_thread(work)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector away: among a million new lists it would look for garbage again and again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def read_json(text: str, name: str, param: str) -> object:
    """Return the value of the JSON `text`, a schema or the arguments of a call; `name` is its name for the client.

    Raises:
        RequestError: it is not JSON, or is nested deeper than Python reads, or holds too much.
    """
    check_parts(text.encode(errors="replace"), name)
    try:
        return json.loads(text)
    except ValueError as error:
        raise RequestError(f"{name} is not valid JSON: {error}.", param=param) from None
    except RecursionError:
        raise RequestError(f"{name} is nested too deeply; send a flatter value.", param=param) from None
