"""A replica that hangs hides its own metrics, and no other's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import pytest

from router.backend import serve_backend
from router.backend.serve_backend import ReplicaTexts


class Result:
    """What Serve gives for a call of one replica: its answer, an error, or nothing for ever."""

    def __init__(self, actor_id: str, answer: str | Exception | None) -> None:
        self._actor_id = actor_id
        self._answer = answer

    async def get_async(self) -> str:
        if self._answer is None:
            await asyncio.Event().wait()
        if isinstance(self._answer, Exception):
            raise self._answer
        return str(self._answer)


class FakeHandle:
    def __init__(self, results: Sequence[Result]) -> None:
        self._results = results

    def broadcast(self, method_name: str) -> FakeHandle:
        assert method_name == "metrics_text"
        return self

    async def _fetch_replica_results_async(self) -> Sequence[Result]:
        return self._results


async def test_a_replica_that_hangs_is_named_and_the_others_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_backend, "TIMEOUT_S", 0.2)
    texts: ReplicaTexts[str] = ReplicaTexts(lambda text: text)

    async def read(*results: Result) -> dict[str, Any]:
        return await texts.read(FakeHandle(results))

    assert await read(Result("1", "a"), Result("2", "b")) == {"a": "a", "b": "b"}
    began_s = time.monotonic()
    assert await read(Result("1", None), Result("2", "b")) == {"a": None, "b": "b"}
    assert time.monotonic() - began_s < 2
    assert await read(Result("2", RuntimeError("dead")), Result("3", None)) == {"b": None, "unknown-1": None}
    assert await read(Result("2", "b")) == {"b": "b"}
