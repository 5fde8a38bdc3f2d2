"""Asynchronous scheduling changes when the host sees tokens, but no token, no ending and no cached block."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace

import pytest
from torch import Tensor

from engine.accounting.draft_shapes import DraftSize
from engine.accounting.record import PassRecord
from engine.batch.span import Span
from engine.config import SchedulerConfig, SpeculationConfig
from engine.engine_core import EngineCore, Speculation
from engine.kv_cache.block_manager import BlockManager
from engine.proposer import NoProposer, Proposer
from engine.scheduler import async_scheduling as overlap
from engine.scheduler.async_scheduling import AsyncScheduling, InFlightBatch
from engine.scheduler.scheduler import Scheduler
from engine.sequence.batch import Batch
from engine.sequence.sequence import Sequence
from engine.verifier.verifier import Verifier
from engine.verifier.verify_task import VerifyResult, VerifyTask
from protos.messages import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
    SpeculationParams,
    VerifyMode,
)
from tests.engine.fixtures.fakes import FakeRunner, ScriptedProposer

V = 16
BLOCK_SIZE = 4


class PassClock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_core(
    is_behind: bool,
    *,
    num_blocks: int = 200,
    max_num_sequences: int = 5,
    max_tokens_per_step: int = 256,
    num_drafts: int = 0,
    proposer: Proposer | None = None,
    clock: PassClock | None = None,
) -> EngineCore:
    blocks = BlockManager(num_blocks, BLOCK_SIZE, "m")
    runner = FakeRunner(num_blocks, BLOCK_SIZE, V)
    limits = SchedulerConfig(max_num_sequences, max_tokens_per_step)
    clock = clock or PassClock()
    scheduler = Scheduler(limits, blocks, max_model_len=100, clock=clock)
    verifier = Verifier()
    return EngineCore(
        runner,
        scheduler,
        Speculation(
            proposer or NoProposer(),
            verifier,
            SpeculationConfig(num_drafts),
            overlap=AsyncScheduling(runner, scheduler, verifier) if is_behind else None,
        ),
    )


def request(name: str, *, k: int | None = None, timeout_s: float | None = None, **sampling: object) -> GenerateRequest:
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **sampling})  # type: ignore[arg-type]
    return GenerateRequest(name, (1, 2, 3), params, SpeculationParams(num_tokens=k), timeout_s=timeout_s)


# ---- the same texts under all events ------------------------------------------------------------------------------


@dataclass
class Life:
    """A client's view of a request; it disconnects after `patience` tokens."""

    patience: int | None = None
    token_ids: list[int] = field(default_factory=list)
    endings: list[tuple[FinishReason, int | None]] = field(default_factory=list)


@dataclass(frozen=True)
class Arrival:
    request: GenerateRequest
    step: int
    patience: int | None


def arrivals(seed: int, count: int = 24) -> list[Arrival]:
    """Requests of all kinds; a third share a prefix."""
    rng = random.Random(seed)
    common = tuple(rng.randrange(V) for _ in range(9))
    found = []
    for index in range(count):
        prompt = tuple(rng.randrange(V) for _ in range(rng.randrange(1, 12)))
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 0.7, 1.0]),
            seed=rng.randrange(100),
            max_tokens=rng.choice([1, 2, 3, 20, 40]),
            stop_token_ids=tuple(rng.sample(range(V), rng.choice([0, 1, 3]))),
            min_tokens=rng.choice([0, 0, 6]),
            top_k=rng.choice([0, 0, 5]),
            top_p=rng.choice([1.0, 0.9]),
            min_p=rng.choice([0.0, 0.02]),
            presence_penalty=rng.choice([0.0, 0.0, 1.0]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            logit_bias=rng.choice([(), ((3, 2.0),)]),
            bad_words=rng.choice([(), ((1, 2), (4,))]),
            num_logprobs=1 if index == 7 else None,
            num_prompt_logprobs=0 if index % 8 == 5 else None,
        )
        request = GenerateRequest(str(index), common + prompt if index % 3 == 0 else prompt, sampling)
        patience = rng.randrange(1, 12) if rng.random() < 0.2 else None
        found.append(Arrival(request, rng.choice([0, 0, rng.randrange(60)]), patience))
    return found


def live(core: EngineCore, arrived: Seq[Arrival]) -> dict[str, Life]:
    """Run to the end, with all invariants checked after every step."""
    lives = {each.request.request_id: Life(each.patience) for each in arrived}
    for step in range(2000):
        for each in arrived:
            if each.step == step:
                core.add(each.request)
        if not core.has_work and step > max(each.step for each in arrived):
            return lives
        for chunk in core.step():
            life = lives[chunk.request_id]
            assert not life.endings, "a token after the end"
            life.token_ids += chunk.token_ids
            if chunk.finish_reason is not None:
                life.endings.append((chunk.finish_reason, chunk.stop_token_id))
            elif life.patience is not None and len(life.token_ids) >= life.patience:
                last = core.abort(chunk.request_id)
                assert last is not None
                life.endings.append((FinishReason.ABORT, None))
        core.scheduler.check_integrity()
        check_cache(core)
    raise AssertionError("the engine makes no progress")


def check_cache(core: EngineCore) -> None:
    """Assert that every block with a key holds the KV of its content."""
    assert isinstance(core.runner, FakeRunner)
    slots = core.runner._kv._slots
    for block_id, content in enumerate(core.blocks._pool._contents):
        if content is not None:
            assert slots[block_id * BLOCK_SIZE : (block_id + 1) * BLOCK_SIZE] == list(content.token_ids)


def check_mix(seed: int, num_blocks: int, max_tokens_per_step: int = 256) -> None:
    waiting = make_core(False, num_blocks=num_blocks, max_tokens_per_step=max_tokens_per_step)
    behind = make_core(True, num_blocks=num_blocks, max_tokens_per_step=max_tokens_per_step)
    assert live(behind, arrivals(seed)) == live(waiting, arrivals(seed))
    assert behind.stats().num_overlapped_passes > 10
    assert waiting.stats().num_overlapped_passes == 0
    assert behind.stats().num_used_blocks == 0
    if num_blocks == 200:
        assert behind.blocks.cached_keys == waiting.blocks.cached_keys


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("num_blocks", "max_tokens_per_step"), [(200, 256), (18, 256), (25, 9)])
def test_async_scheduling_changes_no_text_ending_or_cache(seed: int, num_blocks: int, max_tokens_per_step: int) -> None:
    check_mix(seed, num_blocks, max_tokens_per_step)


def test_a_small_pool_preempts_while_passes_overlap() -> None:
    lives = []
    for is_behind in (True, False):
        core = make_core(is_behind, num_blocks=18)
        requests = [request(str(index), max_tokens=40, temperature=1.0, seed=index) for index in range(4)]
        lives.append(live(core, [Arrival(each, 0, None) for each in requests]))
        assert core.stats().num_preemptions > 0
        assert (core.stats().num_overlapped_passes > 20) is is_behind
    assert lives[0] == lives[1]


# ---- mistakes that must be seen -----------------------------------------------------------------------------------


def the_row_of_an_ended_sequence_is_committed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(overlap, "_of_running", lambda issued: issued)


def logits_of_ended_sequences_stay_in_the_way(patch: pytest.MonkeyPatch) -> None:
    real = overlap._of_running

    def keep_logits(issued: InFlightBatch) -> InFlightBatch | None:
        running = real(issued)
        return None if running is None else replace(running, logits=issued.logits)

    patch.setattr(overlap, "_of_running", keep_logits)


def rows_are_fed_to_the_wrong_sequences(patch: pytest.MonkeyPatch) -> None:
    real = FakeRunner.forward

    def first_rows(self: FakeRunner, spans: Seq[Span], input_ids: Tensor | None = None) -> Tensor:
        return real(self, spans, input_ids if input_ids is None else input_ids.roll(1))

    patch.setattr(FakeRunner, "forward", first_rows)


def the_block_of_an_unknown_token_gets_a_key(patch: pytest.MonkeyPatch) -> None:
    real = Scheduler.follow

    def publish_all(self: Scheduler, batch: Batch) -> Batch | None:
        following = real(self, batch)
        for scheduled in following.scheduled if following else ():
            self.blocks.publish(scheduled.sequence, scheduled.start + 1)
        return following

    patch.setattr(Scheduler, "follow", publish_all)


def blocks_of_the_pass_on_its_way_are_given_away(patch: pytest.MonkeyPatch) -> None:
    real = AsyncScheduling._issue

    def give_back(self: AsyncScheduling, batch: Batch, token_ids: Tensor, tasks: Seq[VerifyTask]) -> None:
        real(self, batch, token_ids, tasks)
        for scheduled in batch.scheduled:
            self._scheduler.blocks.trim(scheduled.sequence, scheduled.start)

    patch.setattr(AsyncScheduling, "_issue", give_back)


MISTAKES = [
    the_row_of_an_ended_sequence_is_committed,
    logits_of_ended_sequences_stay_in_the_way,
    rows_are_fed_to_the_wrong_sequences,
    the_block_of_an_unknown_token_gets_a_key,
    blocks_of_the_pass_on_its_way_are_given_away,
]


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mutants_of_async_scheduling_are_seen(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises((AssertionError, IndexError, ValueError)):
        check_mix(0, num_blocks=200)


# ---- what happens when --------------------------------------------------------------------------------------------


def test_the_next_pass_is_issued_before_the_host_waits_and_it_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    forward, wait = FakeRunner.forward, overlap.DrawnTokens.results

    def noted_forward(self: FakeRunner, spans: Seq[Span], input_ids: Tensor | None = None) -> Tensor:
        events.append("issue" if input_ids is None else "issue ahead")
        return forward(self, spans, input_ids)

    def noted_wait(self: overlap.DrawnTokens) -> list[VerifyResult]:
        events.append("wait")
        return wait(self)

    monkeypatch.setattr(FakeRunner, "forward", noted_forward)
    monkeypatch.setattr(overlap.DrawnTokens, "results", noted_wait)
    core = make_core(True)
    core.add(request("a", max_tokens=4))
    while core.has_work:
        (chunk,) = core.step()
        events.append(f"commit {len(chunk.token_ids)}")
    turn = ["issue ahead", "wait", "commit 1"]
    assert events == ["issue", *turn, *turn, *turn, "commit 1"], "no pass follows the last pass of the text"
    assert core.stats().num_overlapped_passes == 3


@pytest.mark.parametrize(
    ("sampling", "verify", "num_passes"),
    [
        ({}, None, 7),
        ({"temperature": 1.0, "presence_penalty": 1.0, "top_p": 0.9}, None, 7),
        ({"num_logprobs": 0}, None, 0),
        ({"temperature": 1.0}, VerifyMode.REJECTION, 0),
        ({"temperature": 0.0}, VerifyMode.REJECTION, 7),
    ],
)
def test_a_pass_whose_logits_are_read_is_waited_for(
    sampling: dict[str, object], verify: VerifyMode | None, num_passes: int
) -> None:
    core = make_core(True)
    core.add(replace(request("a", **sampling), speculation=SpeculationParams(verify=verify)))
    while core.has_work:
        core.step()
    assert core.stats().num_overlapped_passes == num_passes


def test_a_new_request_is_admitted_by_the_second_step() -> None:
    core = make_core(True)
    core.add(request("a", max_tokens=50))
    for _ in range(5):
        core.step()
    core.add(request("b"))
    assert [chunk.request_id for _ in range(2) for chunk in core.step()] == ["a", "a", "b"]


def test_a_request_that_waits_for_room_stops_no_overlap() -> None:
    core = make_core(True, max_num_sequences=1)
    core.add(request("a", max_tokens=10))
    core.add(request("b", max_tokens=10))
    while core.has_work:
        core.step()
    assert core.stats().num_overlapped_passes == 18


def test_a_request_that_times_out_ends_while_a_pass_is_on_its_way() -> None:
    clock = PassClock()
    core = make_core(True, clock=clock)
    core.add(request("a", max_tokens=90, timeout_s=5.0))
    core.add(request("b", max_tokens=9))
    core.step()
    clock.now_s = 6.0
    chunks = [chunk for _ in range(10) if core.has_work for chunk in core.step()]
    ended = {chunk.request_id: chunk.finish_reason for chunk in chunks if chunk.finish_reason}
    assert ended == {"a": FinishReason.TIMEOUT, "b": FinishReason.LENGTH}
    assert core.stats().num_used_blocks == 0


def test_blocks_are_free_when_an_abort_returns_and_nothing_is_left_to_do() -> None:
    core = make_core(True)
    core.add(request("a", max_tokens=50))
    core.step()
    assert core.abort("a") is not None
    assert core.stats().num_used_blocks == 0
    assert not core.has_work
    core.add(request("a", max_tokens=2))
    assert [len(chunk.token_ids) for _ in range(2) for chunk in core.step()] == [1, 1]


def test_no_row_is_computed_behind_a_texts_last_token() -> None:
    core = make_core(True)
    core.add(request("long", max_tokens=12))
    core.add(request("short", max_tokens=5))
    assert isinstance(core.runner, FakeRunner)
    while core.has_work:
        core.step()
        assert all(span.end < 3 + 12 for span in core.runner.spans)
        if len(core.runner.spans) == 2:
            assert core.runner.spans[1].end < 3 + 5


# ---- with drafts --------------------------------------------------------------------------------------------------


def test_passes_with_drafts_are_waited_for_and_the_proposer_hears_all_when_drafts_begin_again() -> None:
    told: list[int] = []
    proposer = ScriptedProposer(lambda sequence, max_tokens: [7] * max_tokens)
    proposer.commit = lambda sequences: told.extend(len(each.token_ids) for each in sequences)  # type: ignore[method-assign]
    core, plain = make_core(True, num_drafts=3, proposer=proposer), make_core(False)
    for each in (core, plain):
        each.add(request("a", max_tokens=30, temperature=1.0, seed=1))
    (sequence,) = core.scheduler._waiting
    output: list[int] = []
    for allowance, num_steps in [(3, 3), (0, 5), (3, 2), (0, 99)]:
        sequence.draft_allowance = allowance
        before = core.stats().num_overlapped_passes
        for _ in range(num_steps):
            if core.has_work:
                output += [token_id for chunk in core.step() for token_id in chunk.token_ids]
        has_overlapped = core.stats().num_overlapped_passes > before
        assert has_overlapped is (allowance == 0)
        assert told == sorted(told)
        if allowance:
            assert told[-1] == len(sequence.token_ids)
    assert output == [token_id for _ in range(30) for chunk in plain.step() for token_id in chunk.token_ids]


class ScriptedPolicy:
    """Requests a draft of one token in every fourth plan."""

    speedups: dict[str, float] = {}  # noqa: RUF012
    row_prices = ()
    is_ahead = False
    is_resting = False

    def __init__(self) -> None:
        self.num_plans = 0
        self.num_wanted = 0
        self.num_asked = 0

    def on_pass(self, record: PassRecord) -> None:
        self.num_asked += sum(each.num_requested for each in record.passes)

    def charge(self, seconds: float) -> None:
        """Plans are free here."""

    def holds_for(self, sequences: Seq[Sequence]) -> bool:
        return False

    def sizes(self, sequences: Seq[Sequence]) -> list[DraftSize]:
        self.num_plans += 1
        length = int(self.num_plans % 4 == 0)
        self.num_wanted += sum(min(length, each.num_remaining_tokens - 1) for each in sequences)
        return [DraftSize(length, 0)] * len(sequences)

    def plan_ahead(self, sequences: Seq[Sequence]) -> None:
        """Plans are made by `sizes` here."""


def test_a_plan_is_kept_until_a_pass_drafts_by_it() -> None:
    proposer = ScriptedProposer(lambda sequence, max_tokens: [7])
    core = make_core(True, num_drafts=1, proposer=proposer)
    core._accounting.planning.policy = policy = ScriptedPolicy()  # type: ignore[assignment]
    core.add(request("a", max_tokens=60))
    while core.has_work:
        core.step()
    assert policy.num_asked == policy.num_wanted > 5
    assert core.stats().num_overlapped_passes > 20
    assert len(proposer.committed) == policy.num_asked, "each commit is followed by a draft"
