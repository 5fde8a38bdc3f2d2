"""A stream outlives its pair, within its limits."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from protos.errors import (
    DeadlineExceededError,
    EngineError,
    EngineLostError,
    GivenUpError,
    NonFiniteLogitsError,
    OverloadedError,
    UnavailableError,
)
from protos.messages import FinishReason, GenerateRequest, SamplingParams, TokenChunk, TokenLogprobs
from router.backend import migration
from router.backend.migration import MigratingStreams
from tests.protos.filled import filled, names
from tests.router.fixtures.fake_backend import FakeBackend

REQUEST = GenerateRequest("r", (10,), SamplingParams(seed=7, max_tokens=8, stop_token_ids=(0,)))


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "DEADLINE_S", 1.0)
    monkeypatch.setattr(migration, "SILENCE_S", 0.1)
    monkeypatch.setattr(migration, "FIRST_TOKEN_S", 0.2)


async def tokens_of(backend: FakeBackend, request: GenerateRequest = REQUEST) -> list:
    chunks = [chunk async for batch in MigratingStreams(backend.generate).generate(request) for chunk in batch]
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    return [token_id for chunk in chunks for token_id in chunk.token_ids]


@pytest.mark.parametrize("fail_after", [0, 2, 4, 6])
async def test_the_stream_goes_on_from_the_committed_tokens(fail_after: int) -> None:
    backend = FakeBackend(failures=[UnavailableError("gone")], fail_after=fail_after)
    assert await tokens_of(backend) == list(range(11, 19))
    assert backend.requests[1].output_token_ids == tuple(range(11, 11 + fail_after))
    assert backend.requests[1].sampling == REQUEST.sampling
    assert backend.num_running == 0


async def test_what_moves_is_the_whole_request() -> None:
    request = replace(filled(GenerateRequest), output_token_ids=(), timeout_s=50.0)
    request = replace(request, sampling=replace(REQUEST.sampling, num_prompt_logprobs=2), is_moved=False)
    backend = FakeBackend(failures=[UnavailableError("gone")], fail_after=2)
    await tokens_of(backend, request)
    moved = backend.requests[1]
    changed = {name for name in names(GenerateRequest) if getattr(moved, name) != getattr(request, name)}
    assert changed == {"request_id", "output_token_ids", "timeout_s", "sampling", "num_places", "is_moved"}
    assert moved.sampling == replace(request.sampling, num_prompt_logprobs=None)


async def test_many_losses_are_survived_while_there_is_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "_MAX_MIGRATIONS", 1)
    backend = FakeBackend(failures=[UnavailableError("gone")] * 3, fail_after=2)
    assert await tokens_of(backend) == list(range(11, 19))


async def test_every_attempt_after_the_first_is_told() -> None:
    moves: list[int] = []
    backend = FakeBackend(failures=[UnavailableError("gone")] * 3, fail_after=2)
    migrating = MigratingStreams(backend.generate, lambda: moves.append(len(backend.requests)))
    assert [batch async for batch in migrating.generate(REQUEST)]
    assert moves == [1, 2, 3]


async def test_losses_without_progress_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(migration, "_MAX_MIGRATIONS", 2)
    backend = FakeBackend(failures=[UnavailableError("gone")] * 9)
    with pytest.raises(UnavailableError):
        await tokens_of(backend)
    assert len(backend.requests) == 3


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let streams that were lost together go on at once."""
    monkeypatch.setattr(migration, "_APART_S", 0.0)


@pytest.mark.usefixtures("together")
async def test_a_request_that_ends_every_engine_meets_three_of_them() -> None:
    backend = FakeBackend(failures=[EngineLostError("gone")] * 9)
    with pytest.raises(GivenUpError, match="3 engines in a row"):
        await tokens_of(backend)
    assert len(backend.requests) == 3


@pytest.mark.usefixtures("together")
async def test_engines_that_end_after_a_token_are_others_faults() -> None:
    assert await tokens_of(FakeBackend(failures=[EngineLostError("gone")] * 3, fail_after=2)) == list(range(11, 19))


@pytest.mark.usefixtures("together")
async def test_a_pair_that_is_away_has_ended_for_nobody() -> None:
    losses = [EngineLostError("gone"), UnavailableError("restarting"), EngineLostError("gone"), UnavailableError("")]
    assert await tokens_of(FakeBackend(failures=losses)) == list(range(11, 19))


async def test_the_deadline_of_a_migration_ends_it() -> None:
    backend = FakeBackend(failures=[UnavailableError("gone")] * 99)
    with pytest.raises(UnavailableError):
        await asyncio.wait_for(tokens_of(backend), 5)


async def test_a_full_pair_refuses_a_new_request_but_not_one_that_moves() -> None:
    with pytest.raises(OverloadedError):
        await tokens_of(FakeBackend(failures=[OverloadedError("full")]))
    moving = FakeBackend(failures=[UnavailableError("gone"), OverloadedError("full")], fail_after=0)
    moving.fail_after = 2

    async def fail_at_once_on_the_second(request: GenerateRequest, generate=moving.generate):  # type: ignore[no-untyped-def]
        if len(moving.requests) == 1:
            moving.fail_after = 0
        async for batch in generate(request):
            yield batch

    moving.generate = fail_at_once_on_the_second  # type: ignore[method-assign]
    assert await tokens_of(moving) == list(range(11, 19))


async def test_a_full_pair_is_asked_again_for_a_choice_of_a_request_that_was_admitted() -> None:
    backend = FakeBackend(failures=[OverloadedError("full")])
    assert await tokens_of(backend, replace(REQUEST, is_admitted=True)) == list(range(11, 19))


async def test_what_moves_says_so() -> None:
    backend = FakeBackend(failures=[UnavailableError("gone"), UnavailableError("gone")], fail_after=0)
    await tokens_of(backend)
    assert [(request.is_admitted, request.is_moved) for request in backend.requests] == [(False, False)] * 3
    backend = FakeBackend(failures=[UnavailableError("gone")], fail_after=2)
    await tokens_of(backend)
    assert [(request.is_admitted, request.is_moved) for request in backend.requests] == [(False, False), (True, True)]


async def test_other_errors_are_not_retried() -> None:
    backend = FakeBackend(failures=[EngineError("broke")], fail_after=2)
    with pytest.raises(EngineError):
        await tokens_of(backend)
    assert len(backend.requests) == 1


async def test_a_silent_pair_is_given_up() -> None:
    backend = FakeBackend()
    generate = backend.generate

    async def silent_once(request: GenerateRequest):  # type: ignore[no-untyped-def]
        async for batch in generate(request):
            yield batch
            if len(backend.requests) == 1:
                await asyncio.sleep(60)

    backend.generate = silent_once  # type: ignore[method-assign]
    assert await asyncio.wait_for(tokens_of(backend), 5) == list(range(11, 19))
    assert backend.requests[1].output_token_ids == (11, 12)


async def test_a_pair_that_gives_the_sequence_up_is_a_lost_pair() -> None:
    backend = FakeBackend()
    generate = backend.generate

    async def abort_once(request: GenerateRequest):  # type: ignore[no-untyped-def]
        async for batch in generate(request):
            yield batch
            if len(backend.requests) == 1:
                yield [TokenChunk(request.request_id, (99,), finish_reason=FinishReason.ABORT)]

    backend.generate = abort_once  # type: ignore[method-assign]
    assert await tokens_of(backend) == list(range(11, 19))


async def test_the_time_out_spans_all_pairs() -> None:
    backend = FakeBackend(failures=[UnavailableError("gone")] * 50, fail_after=2, step_s=0.05)
    request = GenerateRequest("r", (10,), SamplingParams(max_tokens=200), timeout_s=0.3)
    with pytest.raises(DeadlineExceededError):
        await asyncio.wait_for(tokens_of(backend, request), 5)
    assert all(later.timeout_s < 0.3 for later in backend.requests[1:])


async def test_a_time_out_in_the_engine_is_the_clients_to_know() -> None:
    backend = FakeBackend()

    async def time_out(request: GenerateRequest):  # type: ignore[no-untyped-def]
        yield [TokenChunk(request.request_id, (), finish_reason=FinishReason.TIMEOUT)]

    backend.generate = time_out  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceededError):
        await tokens_of(backend)


async def test_closing_the_stream_closes_the_pairs() -> None:
    backend = FakeBackend()
    async with aclosing(MigratingStreams(backend.generate).generate(REQUEST)) as stream:
        await anext(stream)
        assert backend.num_running == 1
    assert backend.num_running == 0


def chunk_with_logprobs(token_ids: tuple[int, ...], offset: int, reason: FinishReason | None = None) -> TokenChunk:
    logprobs = tuple(TokenLogprobs(token_id, -token_id / 10, ((token_id, -token_id / 10),)) for token_id in token_ids)
    sources = tuple(f"source of {token_id}" for token_id in token_ids)
    prompt = (TokenLogprobs(10, -1.0, ()),) if offset == 0 else ()
    return TokenChunk("r", token_ids, logprobs, reason, offset=offset, sources=sources, prompt_logprobs=prompt)


async def test_a_chunk_that_repeats_tokens_adds_those_behind_them_with_their_own_logprobs_and_sources() -> None:
    backend = FakeBackend()

    async def repeat(request: GenerateRequest):  # type: ignore[no-untyped-def]
        yield [chunk_with_logprobs((11, 12, 13), 0)]
        yield [chunk_with_logprobs((11, 12), 0), chunk_with_logprobs((12, 13, 14, 15), 1)]
        yield [chunk_with_logprobs((15,), 4)]
        yield [chunk_with_logprobs((14, 15), 3, FinishReason.LENGTH)]

    backend.generate = repeat  # type: ignore[method-assign]
    chunks = [chunk async for batch in MigratingStreams(backend.generate).generate(REQUEST) for chunk in batch]
    expected = [
        chunk_with_logprobs((11, 12, 13), 0),
        chunk_with_logprobs((14, 15), 3),
        chunk_with_logprobs((), 5, FinishReason.LENGTH),
    ]
    assert chunks == expected


async def test_a_model_that_has_no_finite_logits_is_asked_once() -> None:
    backend = FakeBackend()
    generate = backend.generate

    async def overflow(request: GenerateRequest):  # type: ignore[no-untyped-def]
        async for batch in generate(request):
            yield batch
            yield [
                TokenChunk(request.request_id, (), finish_reason=FinishReason.NON_FINITE, offset=2, error="too large")
            ]

    backend.generate = overflow  # type: ignore[method-assign]
    with pytest.raises(NonFiniteLogitsError, match="too large") as failure:
        await tokens_of(backend)
    assert (failure.value.http_status, failure.value.grpc_code) == (500, "INTERNAL")
    assert (failure.value.error_type, failure.value.code) == ("server_error", "non_finite_logits")
    assert len(backend.requests) == 1
