"""Blocks from elsewhere change no token, however they come or fail to come; and every block is accounted for."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
import torch

from engine.accounting.engine_stats import FetchFailure
from engine.accounting.rates import RateMeter
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.engine_core import EngineCore, Speculation
from engine.engine_core.loading import load_engine
from engine.kv_cache.block_manager import BlockManager
from engine.model.runner.model_runner import ModelRunner
from engine.proposer import NoProposer, Proposer
from engine.proposer.text_match.text_matcher import NgramProposer
from engine.remote_prefill.kv_transfer import FetchNews, KVChunk
from engine.remote_prefill.remote_prefill import RemotePrefill
from engine.scheduler.scheduler import Scheduler
from engine.verifier.verifier import Verifier
from protos.messages import FinishReason, GenerateRequest, SamplingParams, TokenChunk
from tests.engine.fixtures.checkpoints import VOCAB_SIZE, write_checkpoint
from tests.engine.fixtures.in_process_transport import (
    Fault,
    InProcessTransport,
    cut_off,
    intact,
    lost_after,
    mismatched,
    shuffled,
    silent,
    too_short,
)

P = 4
MAX_TOKENS = 12


@dataclass
class PrefillClock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class PrefilledEngine:
    """An engine with a prefill replica."""

    core: EngineCore
    source: RemotePrefill
    transport: InProcessTransport
    remote: EngineCore
    clock: PrefillClock
    chunks: list[TokenChunk] = field(default_factory=list)

    def step(self) -> None:
        self.chunks += self.core.step()
        self.core.scheduler.check_integrity()
        self.clock.now_s += 0.01

    def run(self) -> dict[str, list[int]]:
        for _ in range(3000):
            if not self.core.has_work:
                return self.texts()
            self.step()
            if self.core.is_starved:
                self.clock.now_s += 0.5
        raise AssertionError("the engine makes no progress")

    def texts(self) -> dict[str, list[int]]:
        texts: dict[str, list[int]] = {}
        for chunk in self.chunks:
            texts.setdefault(chunk.request_id, []).extend(chunk.token_ids)
        return texts


@dataclass(frozen=True, slots=True)
class PrefillSetup:
    fault: Fault = intact
    proposer: Callable[[], Proposer] = NoProposer
    num_drafts: int = 0
    num_blocks: int = 256
    max_tokens_per_step: int = 64
    num_remote_blocks: int = 256
    max_remote_tokens_per_step: int = 12
    min_tokens: int = 8


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, seed=0)
    return ModelConfig(str(folder), dtype="float32")


def cache(num_blocks: int) -> CacheConfig:
    return CacheConfig(P, num_blocks, memory_bytes=None)


def build(model: ModelConfig, setup: PrefillSetup) -> PrefilledEngine:
    remote = load_engine(
        EngineConfig(
            model,
            cache(setup.num_remote_blocks),
            SchedulerConfig(max_tokens_per_step=setup.max_remote_tokens_per_step),
        )
    )
    transport = InProcessTransport(remote, setup.fault)
    clock = PrefillClock()
    runner = ModelRunner(model, cache(setup.num_blocks))
    blocks = BlockManager(runner.num_blocks, P, runner.model_version)
    rates = RateMeter()
    source = RemotePrefill(transport, runner, blocks, rates, setup.min_tokens, clock)
    scheduler = Scheduler(
        SchedulerConfig(max_tokens_per_step=setup.max_tokens_per_step), blocks, 200, source, clock=clock
    )
    core = EngineCore(
        runner,
        scheduler,
        Speculation(setup.proposer(), Verifier(), SpeculationConfig(setup.num_drafts)),
    )
    return PrefilledEngine(core, source, transport, remote, clock)


def requests(num: int = 10) -> list[GenerateRequest]:
    """Every third prompt is short; the others have up to 60 tokens, and pairs of them share up to 24."""
    source = random.Random(1)
    shared = tuple(source.randrange(VOCAB_SIZE) for _ in range(24))
    made = []
    for index in range(num):
        length = 5 if index % 3 == 2 else 20 + 4 * index
        own = tuple(source.randrange(VOCAB_SIZE) for _ in range(length))
        prompt = (*shared, *own) if index % 2 else own
        sampling = SamplingParams(temperature=[0.0, 1.0][index % 2], seed=index, max_tokens=MAX_TOKENS)
        made.append(GenerateRequest(str(index), prompt, sampling))
    return made


@pytest.fixture(scope="module")
def reference(model: ModelConfig) -> dict[str, list[int]]:
    core = load_engine(EngineConfig(model, cache(256)))
    texts: dict[str, list[int]] = {}
    for request in requests():
        core.add(replace(request, cache_salt=request.request_id))  # shares no block with another
        while core.has_work:
            for chunk in core.step():
                texts.setdefault(chunk.request_id, []).extend(chunk.token_ids)
    return texts


SETUPS = {
    "remote": PrefillSetup(),
    "speculation": PrefillSetup(proposer=NgramProposer, num_drafts=4),
    "chunked here": PrefillSetup(max_tokens_per_step=7),
    "preempted": PrefillSetup(num_blocks=30),
    "preempted, speculation": PrefillSetup(num_blocks=30, proposer=NgramProposer, num_drafts=4),
    "a small pool there": PrefillSetup(num_remote_blocks=24),
    "one block a step there": PrefillSetup(max_remote_tokens_per_step=P),
    "everything in one step there": PrefillSetup(max_remote_tokens_per_step=1000),
    "too small a pool there": PrefillSetup(num_remote_blocks=6),
    "killed before": PrefillSetup(fault=lost_after(0)),
    "silent": PrefillSetup(fault=silent),
    "other model": PrefillSetup(fault=mismatched),
    "blocks out of order": PrefillSetup(fault=shuffled),
    "blocks of another size": PrefillSetup(fault=too_short),
    "cut off": PrefillSetup(fault=cut_off),
}
FAILURES = {
    "too small a pool there": FetchFailure.REFUSED,
    "killed before": FetchFailure.LOST,
    "silent": FetchFailure.TIMEOUT,
    "other model": FetchFailure.MISMATCH,
    "blocks out of order": FetchFailure.GARBLED,
    "blocks of another size": FetchFailure.GARBLED,
    "cut off": FetchFailure.GARBLED,
}


@pytest.mark.parametrize("name", SETUPS)
def test_remote_and_local_prefill_give_the_same_tokens(
    name: str, model: ModelConfig, reference: dict[str, list[int]]
) -> None:
    pair = build(model, SETUPS[name])
    for request in requests():
        pair.core.add(request)
    assert pair.run() == reference
    stats = pair.core.stats()
    assert stats.remote.num_fetches > 0
    assert stats.num_used_blocks == 0
    assert stats.remote.num_fetching == 0
    if name in FAILURES:
        assert set(stats.remote.failures) == {FAILURES[name]}
    else:
        assert stats.remote.num_tokens > 100
        assert not stats.remote.failures
    if name.startswith("preempted"):
        assert stats.num_preemptions > 0


@pytest.mark.parametrize("name", ["remote", "speculation", "chunked here", "preempted", "cut off"])
def test_what_blocks_held_before_blocks_from_elsewhere_came_counts_for_nothing(
    name: str, model: ModelConfig, reference: dict[str, list[int]]
) -> None:
    """A last block that is not full keeps what its owner before left: numbers that are not finite."""
    pair = build(model, SETUPS[name])
    for engine in (pair.core, pair.remote):
        for pool in (*engine.runner._cache.keys, *engine.runner._cache.values):
            pool.fill_(math.nan)
    for request in requests():
        pair.core.add(request)
    assert pair.run() == reference
    assert pair.core.stats().num_non_finite_requests == 0


def test_blocks_from_elsewhere_that_are_not_finite_end_their_request_and_are_not_found_again(
    model: ModelConfig, reference: dict[str, list[int]]
) -> None:
    """A replica computes NaN for the first prompt, once. The prompt is read again without the blocks of that time."""

    def spoilt(news: FetchNews) -> list[FetchNews]:
        is_first = isinstance(news, KVChunk) and news.fetch_id == 0 and news.header.first_block == 0
        return [replace(news, blocks=torch.full_like(news.blocks, 0xFF))] if is_first else [news]  # NaN in float32

    pair = build(model, PrefillSetup(spoilt))
    asked = [request for request in requests()[::2] if len(request.prompt_token_ids) > 8]  # they share nothing
    for request in asked:
        pair.core.add(request)
    texts = pair.run()
    assert [name for name, text in texts.items() if not text] == [asked[0].request_id]
    assert pair.core.stats().num_non_finite_requests == 1
    pair.chunks.clear()
    pair.core.add(asked[0])
    texts |= pair.run()
    assert texts == {request.request_id: reference[request.request_id] for request in asked}
    assert pair.core.blocks.num_free_blocks == pair.core.blocks.num_blocks


@pytest.mark.parametrize("num_chunks", range(1, 12, 2))
def test_tokens_are_the_same_whenever_the_replica_dies(
    num_chunks: int, model: ModelConfig, reference: dict[str, list[int]]
) -> None:
    pair = build(model, PrefillSetup(lost_after(num_chunks)))
    for request in requests():
        pair.core.add(request)
    assert pair.run() == reference
    stats = pair.core.stats().remote
    assert stats.failures[FetchFailure.LOST] > 0
    assert stats.num_tokens > 0


@pytest.mark.parametrize("seed", range(6))
def test_texts_are_the_same_under_random_arrivals_aborts_and_timeouts(
    seed: int, model: ModelConfig, reference: dict[str, list[int]]
) -> None:
    """Random arrivals, aborts and time-outs over a small pool: every text that is not aborted is complete."""
    source = random.Random(seed)
    setup = PrefillSetup(num_blocks=source.choice([24, 40, 100]), fault=source.choice([intact, lost_after(5), silent]))
    pair = build(model, setup)
    gone: set[str] = set()
    for request in source.sample(requests(), 10):
        timeout_s = source.choice([None, None, 0.1])
        pair.core.add(replace(request, timeout_s=timeout_s))
        for _ in range(source.randrange(4)):
            pair.step()
        if source.random() < 0.3 and pair.core.abort(request.request_id) is not None:
            gone.add(request.request_id)
            pair.core.scheduler.check_integrity()
    texts = pair.run()
    gone |= {chunk.request_id for chunk in pair.chunks if chunk.finish_reason is FinishReason.TIMEOUT}
    for name, text in texts.items():
        assert text == (reference[name][: len(text)] if name in gone else reference[name])
    assert len(texts.keys() | gone) == 10
    assert pair.core.stats().num_used_blocks == 0


def long_request(name: str, length: int = 60, seed: int = 0, **more: object) -> GenerateRequest:
    source = random.Random(seed)
    prompt = tuple(source.randrange(VOCAB_SIZE) for _ in range(length))
    return GenerateRequest(name, prompt, SamplingParams(temperature=0.0, max_tokens=4), **more)  # type: ignore[arg-type]


def test_all_whole_blocks_before_the_last_token_are_fetched(model: ModelConfig) -> None:
    pair = build(model, PrefillSetup())
    pair.core.add(long_request("a", 61))
    pair.run()
    assert pair.core.stats().remote.num_tokens == 60
    assert pair.core.rates.prefill_tokens_per_s == 0.0, "nothing that deserves the name was prefilled here"


def test_a_traced_request_reports_its_time_to_first_token_once(model: ModelConfig) -> None:
    pair = build(model, PrefillSetup())
    pair.core.add(long_request("a", 61, is_traced=True), arrival_s=pair.clock())
    pair.core.add(long_request("b", 61), arrival_s=pair.clock())
    pair.clock.now_s += 0.25
    pair.run()
    first, *later = [chunk for chunk in pair.chunks if chunk.request_id == "a" and chunk.token_ids]
    assert first.times is not None
    assert first.times.queued_s == pytest.approx(0.25)
    assert first.times.transfer_s > 0
    assert first.times.prefill_s >= 0
    assert first.times.routed_s is None
    others = [*later, *(chunk for chunk in pair.chunks if chunk.request_id == "b")]
    assert {chunk.times for chunk in others} == {None}
    prefills = pair.core.stats().prefill_times
    assert sum(prefills.counts) == 2, "of every sequence, once"
    assert prefills.total >= first.times.prefill_s


def test_only_missing_blocks_are_ordered(model: ModelConfig) -> None:
    pair = build(model, PrefillSetup())
    pair.core.add(long_request("a", 60))
    pair.run()
    pair.core.add(replace(long_request("b", 60), prompt_token_ids=(*long_request("b").prompt_token_ids, *range(20))))
    pair.run()
    first, second = pair.transport.orders
    assert (first.first_block, len(first.token_ids)) == (0, 56)
    assert second.first_block == 15, "its prompt, and the token computed after it"
    assert len(second.token_ids) == 76


def test_a_short_prompt_is_read_here(model: ModelConfig) -> None:
    pair = build(model, PrefillSetup(min_tokens=30))
    pair.core.add(long_request("a", 30))
    pair.run()
    assert pair.transport.orders == []


def test_samples_of_one_prompt_are_fetched_once(model: ModelConfig) -> None:
    pair = build(model, PrefillSetup())
    for index in range(4):
        pair.core.add(replace(long_request(f"sample {index}"), sample_index=index))
    texts = pair.run()
    assert len(pair.transport.orders) == 1
    assert len({tuple(text) for text in texts.values()}) == 1


def test_a_follower_takes_over_when_the_first_one_leaves(model: ModelConfig) -> None:
    pair = build(model, PrefillSetup())
    pair.core.add(long_request("a"))
    pair.core.add(long_request("b"))
    pair.step()
    pair.step()
    pair.core.abort("a")
    assert pair.transport.cancelled == [0]
    pair.run()
    assert len(pair.transport.orders) == 2
    assert pair.transport.orders[1].first_block > 0, "what had come is in the prefix cache"


@pytest.mark.parametrize("num_steps", [1, 2, 3])
def test_an_aborted_fetch_leaves_two_idle_engines_and_every_block_free(model: ModelConfig, num_steps: int) -> None:
    """Later messages and the deadline of an aborted fetch find no fetch."""
    pair = build(model, PrefillSetup())
    pair.core.add(long_request("a"))
    for _ in range(num_steps):
        pair.step()
    (sequence,) = pair.core.scheduler._running
    assert sequence.is_fetching
    pair.core.abort("a")
    assert not sequence.block_table
    assert pair.source.stats.num_fetching == 0
    for engine in (pair.core, pair.remote):
        assert not engine.has_work
        assert engine.blocks.num_free_blocks == engine.blocks.num_blocks
        engine.blocks.check_integrity([])
    pair.clock.now_s += 1000.0
    for _ in range(3):
        pair.step()
    assert pair.source.stats.failures == {}
    pair.core.add(long_request("b"))
    assert pair.run()["b"]


def test_sequences_of_different_salts_do_not_follow_each_other(model: ModelConfig) -> None:
    pair = build(model, PrefillSetup())
    pair.core.add(long_request("a", cache_salt="one"))
    pair.core.add(long_request("b", cache_salt="two"))
    pair.run()
    assert [order.cache_salt for order in pair.transport.orders] == ["one", "two"]


def test_other_sequences_run_while_one_is_fetching(model: ModelConfig) -> None:
    pair = build(model, PrefillSetup(fault=silent))
    pair.core.add(long_request("waits"))
    pair.core.add(long_request("runs", 5))
    for _ in range(5):
        pair.step()
    assert [chunk.request_id for chunk in pair.chunks if chunk.finish_reason] == ["runs"]
    assert pair.core.stats().remote.num_fetching == 1


def test_an_engine_whose_sequences_all_wait_is_starved(model: ModelConfig) -> None:
    pair = build(model, PrefillSetup(fault=silent))
    pair.core.add(long_request("a"))
    pair.step()
    pair.step()
    assert pair.core.is_starved
    pair.core.add(long_request("b", 5))
    pair.step()
    assert not pair.core.is_starved


def test_a_sequence_without_room_orders_nothing(model: ModelConfig) -> None:
    pair = build(model, PrefillSetup(num_blocks=20, fault=silent))
    pair.core.add(long_request("a", 50))
    pair.core.add(long_request("b", 50, seed=1))
    pair.step()
    assert [order.request_id for order in pair.transport.orders] == ["a"]


def test_after_a_failure_prompts_are_read_here_for_a_while(model: ModelConfig) -> None:
    faults = iter([lost_after(0), intact])
    current = next(faults)
    pair = build(model, PrefillSetup(fault=lambda news: current(news)))
    pair.core.add(long_request("a", seed=1))
    pair.run()
    pair.core.add(long_request("b", seed=2))
    pair.run()
    assert len(pair.transport.orders) == 1
    current = next(faults)
    pair.clock.now_s += 5.0
    pair.core.add(long_request("c", seed=3))
    pair.run()
    assert len(pair.transport.orders) == 2


def test_an_order_that_no_replica_accepts_is_given_up_in_two_seconds_after_the_first(model: ModelConfig) -> None:
    current: Fault = intact
    pair = build(model, PrefillSetup(fault=lambda news: current(news)))
    pair.core.add(long_request("a", seed=1))
    pair.run()
    current = silent
    pair.core.add(long_request("b", seed=2))
    began_s = pair.clock.now_s
    pair.run()
    assert len(pair.transport.orders) == 2
    assert pair.source.stats.failures == {FetchFailure.TIMEOUT: 1}
    assert 2.0 < pair.clock.now_s - began_s < 4.0


def test_a_mismatch_is_logged_once(model: ModelConfig, caplog: pytest.LogCaptureFixture) -> None:
    pair = build(model, PrefillSetup(fault=mismatched))
    with caplog.at_level(logging.WARNING):
        for seed in range(3):
            pair.core.add(long_request(str(seed), seed=seed))
            pair.run()
            pair.clock.now_s += 100.0
    assert len(pair.transport.orders) == 3
    (record,) = caplog.records
    assert "dtype is torch.float32 here and torch.bfloat16 there" in record.getMessage()


def test_prompts_with_logprobs_are_read_here(model: ModelConfig) -> None:
    pair = build(model, PrefillSetup())
    request = long_request("a")
    pair.core.add(replace(request, sampling=replace(request.sampling, num_prompt_logprobs=0)))
    pair.run()
    assert pair.transport.orders == []
    assert len(pair.chunks[0].prompt_logprobs) == 59


def test_a_follower_leaves_where_the_prompts_part(model: ModelConfig) -> None:
    pair = build(model, PrefillSetup(min_tokens=16, max_remote_tokens_per_step=8))
    pair.core.add(long_request("long", 100))
    short = (*long_request("short", 100).prompt_token_ids[:20], 1, 2, 3)
    pair.core.add(replace(long_request("short"), prompt_token_ids=short))
    pair.run()
    (order,) = pair.transport.orders
    assert order.request_id == "long"
    ended = [chunk.request_id for chunk in pair.chunks if chunk.finish_reason]
    assert ended == ["short", "long"]


def test_an_order_has_the_salt_and_the_tokens_of_its_request(model: ModelConfig) -> None:
    pair = build(model, PrefillSetup())
    prompt = tuple(range(3, 47))
    for request_id, salt in (("a", "one"), ("b", "two"), ("c", "")):
        pair.core.add(GenerateRequest(request_id, prompt, SamplingParams(max_tokens=1), cache_salt=salt))
        pair.run()
    orders = pair.transport.orders
    assert [(order.request_id, order.cache_salt, order.first_block) for order in orders] == [
        ("a", "one", 0),
        ("b", "two", 0),
        ("c", "", 0),
    ]
    assert all(order.token_ids == prompt[: len(order.token_ids)] for order in orders)
    assert all(len(order.token_ids) // P * P == len(order.token_ids) > 0 for order in orders)
    assert len({order.fetch_id for order in orders}) == 3
    assert all(order.timeout_s > 0 for order in orders)
    assert pair.remote.stats().num_prefix_hit_tokens == 0
