"""Each token is delivered once, whatever is lost, late, repeated or restarted on the way from the pairs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protos.errors import ModelChangedError, OverloadedError, UnavailableError
from protos.messages import FinishReason, GenerateRequest, SamplingParams, SpeculationStats, TokenChunk
from router.backend import migration
from router.backend.migration import MigratingStreams

MAX_TOKENS = 12
REQUEST = GenerateRequest("r", (1,), SamplingParams(max_tokens=MAX_TOKENS), model_version="v1")
FAULTS = ["lose", "repeat", "late", "stale", "early end", "silence", "death", "abort", "alive", "full"]


def truth(request: GenerateRequest, num_per_step: int) -> list[TokenChunk]:
    """The chunks of a pair without faults; the token at place i of the output is 100 + i."""
    chunks = []
    for offset in range(len(request.output_token_ids), MAX_TOKENS, num_per_step):
        token_ids = tuple(range(100 + offset, 100 + min(offset + num_per_step, MAX_TOKENS)))
        is_last = offset + num_per_step >= MAX_TOKENS
        stats = SpeculationStats(len(token_ids), 0, (1,))
        reason = FinishReason.LENGTH if is_last else None
        chunks.append(TokenChunk(request.request_id, token_ids, finish_reason=reason, offset=offset, speculation=stats))
    return chunks


class FaultyPairs:
    """Each attempt has one fault after some chunks, then none; chunks of earlier attempts come in between."""

    def __init__(self, faults: list[tuple[str, int, int]]) -> None:
        self._faults = faults
        self._sent: list[TokenChunk] = []

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Sequence[TokenChunk], None]:
        fault, after, num_per_step = self._faults.pop(0) if self._faults else ("none", 0, 3)
        chunks = truth(request, num_per_step)
        after = min(after, len(chunks) - 1)
        for batch in (*([chunk] for chunk in chunks[:after]), *self._faulty(fault, chunks, after)):
            if isinstance(batch, BaseException):
                raise batch
            if batch is None:
                await asyncio.sleep(60)
            else:
                self._sent += batch
                yield batch

    def _faulty(
        self, fault: str, chunks: list[TokenChunk], after: int
    ) -> Sequence[Sequence[TokenChunk] | BaseException | None]:
        rest = [[chunk] for chunk in chunks[after:]]
        lost = UnavailableError("lost")
        behaviors: dict[str, Sequence[Sequence[TokenChunk] | BaseException | None]] = {
            "lose": [*rest[1:], lost],
            "repeat": [*rest[:1], chunks[: after + 1], *rest[1:]],
            "late": [*rest[1:2], *rest[:1], *rest[2:], lost],
            "stale": [self._sent, *rest],
            "alive": [[], [], *rest],
            "silence": [None],
            "death": [lost],
            "full": [OverloadedError("full") if after else lost],
            "abort": [[replace(chunks[after], finish_reason=FinishReason.ABORT)]],
            "early end": [],
        }
        return behaviors.get(fault, rest)


@pytest.fixture(scope="module", autouse=True)
def short_pauses() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(migration, "_FIRST_PAUSE_S", 1e-4)
        patch.setattr(migration, "_LONGEST_PAUSE_S", 1e-3)
        patch.setattr(migration, "SILENCE_S", 0.02)
        patch.setattr(migration, "FIRST_TOKEN_S", 0.02)
        yield


@settings(max_examples=150)
@example([("late", 1, 2), ("repeat", 1, 2)])
@example([("lose", 0, 1), ("stale", 0, 5)])
@example([("abort", 4, 1), ("early end", 0, 1), ("silence", 0, 3)])
@example([("full", 0, 1), ("full", 2, 2)])
@given(st.lists(st.tuples(st.sampled_from(FAULTS), st.integers(0, 4), st.integers(1, 5)), max_size=8))
def test_each_token_is_delivered_once_and_in_order(faults: list[tuple[str, int, int]]) -> None:
    async def read() -> list[TokenChunk]:
        backend = MigratingStreams(FaultyPairs(faults).generate)
        return [chunk async for batch in backend.generate(REQUEST) for chunk in batch]

    chunks = asyncio.run(read())
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == list(range(100, 100 + MAX_TOKENS))
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [FinishReason.LENGTH]


async def test_drafts_of_all_attempts_are_summed() -> None:
    backend = MigratingStreams(FaultyPairs([("death", 2, 3)]).generate)
    chunks = [chunk async for batch in backend.generate(REQUEST) for chunk in batch]
    assert chunks[-1].speculation == SpeculationStats(6, 0, (2,))


async def test_a_changed_model_ends_the_stream_by_name() -> None:
    class Redeployed(FaultyPairs):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[Sequence[TokenChunk], None]:
            if request.output_token_ids:
                raise ModelChangedError("the pair serves v2")
            async for batch in super().generate(request):
                yield batch

    changes: list[bool] = []
    pairs = Redeployed([("death", 2, 3)])
    backend = MigratingStreams(pairs.generate, on_model_change=lambda: changes.append(True))
    delivered = []
    try:
        async for batch in backend.generate(REQUEST):
            delivered += [token_id for chunk in batch for token_id in chunk.token_ids]
    except ModelChangedError:
        assert delivered == list(range(100, 106))
    assert changes == [True]
