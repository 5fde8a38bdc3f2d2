"""Every sequence gets the same tokens as alone, for any budget, pool, drafts and other sequences."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from engine.accounting.rates import RateMeter
from engine.batch.draft import Draft
from engine.config import SchedulerConfig
from engine.kv_cache.block_manager import BlockManager
from engine.scheduler.scheduler import Scheduler
from engine.sequence.batch import Batch
from engine.sequence.sequence import Sequence, SequenceStatus
from engine.verifier.verify_task import VerifyResult
from protos.errors import RequestError
from protos.messages import FinishReason, GenerateRequest, SamplingParams, TokenChunk, TokenLogprobs
from tests.engine.fixtures.builders import sequence_of, work_record
from tests.engine.fixtures.fakes import PagedTokens

P = 4
V = 5


def next_token(prefix: Seq[int | None]) -> int:
    """The whole target model: one token for every prefix."""
    return blake2b(repr(tuple(prefix)).encode()).digest()[0] % V


def expected_output(request: GenerateRequest, max_len: int) -> tuple[list[int], FinishReason]:
    """The tokens that plain decoding of this request alone gives."""
    output = list(request.output_token_ids)
    sampling = request.sampling
    while True:
        if output and output[-1] in sampling.stop_token_ids and len(output) > sampling.min_tokens:
            return output, FinishReason.STOP
        if len(output) >= min(sampling.max_tokens, max_len - len(request.prompt_token_ids)):
            return output, FinishReason.LENGTH
        output.append(next_token([*request.prompt_token_ids, *output]))


@dataclass
class Bench:
    """A scheduler, a pool that remembers tokens, and a verifier that reads them back."""

    num_blocks: int = 64
    max_num_sequences: int = 8
    max_tokens_per_step: int = 64
    max_model_len: int = 1000
    now_s: float = 0.0
    max_stall_passes: float | None = 2.0
    chunks: list[TokenChunk] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.blocks = BlockManager(self.num_blocks, P, "m")
        self.kv = PagedTokens(self.num_blocks, P)
        config = SchedulerConfig(self.max_num_sequences, self.max_tokens_per_step, self.max_stall_passes)
        self.rates = RateMeter()
        self.scheduler = Scheduler(config, self.blocks, self.max_model_len, clock=lambda: self.now_s, rates=self.rates)
        self.names = count()

    def add(
        self,
        prompt: Seq[int],
        *,
        max_tokens: int = 8,
        num_drafts: int = 0,
        priority: int = 0,
        timeout_s: float | None = None,
        output: Seq[int] = (),
        stop: Seq[int] = (),
        min_tokens: int = 0,
        salt: str = "",
        is_moved: bool = False,
    ) -> Sequence:
        sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stop), min_tokens=min_tokens)
        request = GenerateRequest(
            str(next(self.names)),
            tuple(prompt),
            sampling,
            priority=priority,
            timeout_s=timeout_s,
            output_token_ids=tuple(output),
            cache_salt=salt,
            is_moved=is_moved,
        )
        sequence = sequence_of(request, num_drafts, arrival_s=self.now_s)
        self.scheduler.add(sequence)
        return sequence

    def step(self, num_right: int = 99) -> list[TokenChunk]:
        """Run one step; the first `num_right` drafts of every sequence match the target."""
        return self.finish(self.scheduler.schedule(), num_right)

    def reason_of(self, sequence: Sequence) -> FinishReason | None:
        """The reason in the sequence's last chunk."""
        return next(each for each in reversed(self.chunks) if each.request_id == sequence.request_id).finish_reason

    def finish(self, batch: Batch, num_right: int = 99) -> list[TokenChunk]:
        drafts = [
            self._draft(scheduled.sequence, scheduled.max_draft_tokens, min(num_right, scheduled.max_draft_tokens))
            for scheduled in batch.sampled
        ]
        spans = batch.spans([Draft(tuple(draft)) for draft in drafts])
        for span in spans:
            self.kv.write(span)
        for scheduled, span in zip(batch.scheduled, spans, strict=True):
            seen = self.kv.read(span, scheduled.start + scheduled.num_tokens)
            computed = scheduled.sequence.token_ids[: scheduled.start + scheduled.num_tokens]
            assert list(seen) == computed, "a wrong block was read"
        verified = [
            _verify([self.kv.read(span, span.end - behind) for behind in reversed(range(span.num_logits))], draft)
            for span, draft in zip(spans, drafts, strict=False)
        ]
        new = self.scheduler.commit(batch, [len(draft) for draft in drafts], verified)
        self.scheduler.check_integrity()
        self.chunks += new
        return new

    def run(self) -> None:
        for _ in range(500):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("the scheduler makes no progress")

    def output(self, sequence: Sequence) -> list[int]:
        return [token for chunk in self.chunks if chunk.request_id == sequence.request_id for token in chunk.token_ids]

    @staticmethod
    def _draft(sequence: Sequence, num_tokens: int, num_right: int) -> list[int]:
        prefix = list(sequence.token_ids)
        for index in range(num_tokens):
            prefix.append((next_token(prefix) + (index >= num_right)) % V)
        return prefix[len(sequence.token_ids) :]


def _verify(prefixes: Seq[Seq[int | None]], draft: Seq[int]) -> VerifyResult:
    tokens: list[int] = []
    for index, prefix in enumerate(prefixes):
        tokens.append(next_token(prefix))
        if index == len(draft) or draft[index] != tokens[-1]:
            break
    logprobs = tuple(TokenLogprobs(token, 0.0) for token in tokens)
    return VerifyResult(tuple(tokens), len(tokens) - 1, logprobs)


def scheduled_of(batch: Batch) -> list[tuple[str, int, int, int]]:
    return [(s.sequence.request_id, s.start, s.num_tokens, s.max_draft_tokens) for s in batch.scheduled]


def test_prefill_is_cut_into_chunks_of_the_budget() -> None:
    bench = Bench(max_tokens_per_step=8)
    sequence = bench.add(range(20))
    assert [bench.step() for _ in range(2)] == [[], []]
    assert sequence.num_computed_tokens == 16
    assert len(bench.step()) == 1
    assert sequence.num_output_tokens == 1


@pytest.mark.parametrize(("max_stall_passes", "num_tokens"), [(2.0, 40), (4.0, 80), (None, 199)])
def test_a_prompt_holds_up_running_sequences_for_a_few_passes_at_most(
    max_stall_passes: float | None, num_tokens: int
) -> None:
    bench = Bench(num_blocks=256, max_tokens_per_step=200, max_stall_passes=max_stall_passes)
    bench.rates.on_pass(work_record(100, 0, 0, 0, seconds=0.100))
    bench.rates.on_pass(work_record(0, 1, 10, 1, seconds=0.020))
    bench.add(range(150), max_tokens=50)
    assert len(bench.step()) == 1
    bench.add(range(300, 500))
    assert scheduled_of(bench.scheduler.schedule()) == [("0", 150, 1, 0), ("1", 0, num_tokens, 0)]  # 1 ms a token


def test_verification_rows_come_before_prefill_chunks() -> None:
    bench = Bench(max_tokens_per_step=12)
    bench.add(range(5), num_drafts=3)
    bench.step()
    bench.add(range(100, 130))
    assert scheduled_of(bench.scheduler.schedule()) == [("0", 5, 1, 3), ("1", 0, 8, 0)]


def test_no_draft_holds_up_more_prompts_than_sequences_decode() -> None:
    bench = Bench()
    bench.add(range(5), num_drafts=3)
    bench.step()
    bench.add(range(100, 105), num_drafts=3)
    batch = bench.scheduler.schedule()
    assert scheduled_of(batch) == [("0", 5, 1, 3), ("1", 0, 5, 0)]
    bench.finish(batch, num_right=0)
    for first in (200, 300, 400):
        bench.add(range(first, first + 5))
    batch = bench.scheduler.schedule()
    assert [drafts for *_, drafts in scheduled_of(batch)] == [0] * 5
    bench.finish(batch)
    assert [drafts for *_, drafts in scheduled_of(bench.scheduler.schedule())] == [3, 3, 0, 0, 0]


def test_drafts_go_on_where_the_prompts_that_wait_have_no_seat() -> None:
    bench = Bench(max_num_sequences=2)
    bench.add(range(5), num_drafts=3)
    bench.step()
    for first in (100, 200, 300):
        bench.add(range(first, first + 5))
    assert scheduled_of(bench.scheduler.schedule())[0] == ("0", 5, 1, 3)


def test_drafts_go_on_where_the_prompts_that_wait_have_no_blocks() -> None:
    bench = Bench(num_blocks=8)
    bench.add(range(20), num_drafts=3)
    bench.step()
    for first in (100, 200):
        bench.add(range(first, first + 12))
    assert scheduled_of(bench.scheduler.schedule()) == [("0", 20, 1, 3)]


def test_a_seed_that_depends_on_lengths_keeps_its_drafts_beside_prompts() -> None:
    bench = Bench()
    sequence = bench.add(range(5), num_drafts=3)
    sequence.has_fixed_length = True
    bench.step()
    for first in (100, 200):
        bench.add(range(first, first + 5))
    assert scheduled_of(bench.scheduler.schedule())[0] == ("0", 5, 1, 3)


def test_sampled_sequences_come_first() -> None:
    bench = Bench(max_tokens_per_step=20)
    bench.add(range(30))
    bench.step()
    bench.add([9, 8, 7])
    batch = bench.scheduler.schedule()
    assert scheduled_of(batch) == [("0", 20, 10, 0), ("1", 0, 3, 0)]
    bench.finish(batch)
    bench.add(range(200, 240))
    assert [scheduled.is_sampled for scheduled in bench.scheduler.schedule().scheduled] == [True, True, False]


def test_siblings_in_one_step_share_prompt_blocks() -> None:
    bench = Bench()
    siblings = [bench.add(range(10)) for _ in range(3)]
    batch = bench.scheduler.schedule()
    assert scheduled_of(batch) == [("0", 0, 10, 0), ("1", 8, 2, 0), ("2", 8, 2, 0)]
    assert len({tuple(sibling.block_table[:2]) for sibling in siblings}) == 1
    bench.finish(batch)
    assert [sibling.num_cached_tokens for sibling in siblings] == [0, 8, 8]


def test_lower_priority_numbers_then_earlier_arrivals_are_admitted_first() -> None:
    bench = Bench(max_num_sequences=2)
    for priority in (1, 0, 1, 0):
        bench.add([7, 7], priority=priority)
    assert [scheduled.sequence.request_id for scheduled in bench.scheduler.schedule().scheduled] == ["1", "3"]


def test_what_moves_from_a_lost_pair_goes_before_newcomers() -> None:
    bench = Bench(max_num_sequences=2)
    bench.add([7, 7])
    bench.add([7, 7], priority=-1)
    bench.add([7, 7], is_moved=True)
    assert [scheduled.sequence.request_id for scheduled in bench.scheduler.schedule().scheduled] == ["2", "1"]


def test_no_request_overtakes_a_large_prompt_that_waits_for_blocks() -> None:
    bench = Bench(num_blocks=8)
    bench.add(range(16), max_tokens=8)
    bench.step()
    large, small = bench.add(range(100, 124), max_tokens=2), bench.add([7], max_tokens=2)
    bench.step()
    assert (large.status, small.status) == (SequenceStatus.WAITING, SequenceStatus.WAITING)
    bench.run()
    assert large.status is SequenceStatus.FINISHED


def test_the_most_urgent_draft_gets_the_last_of_the_budget() -> None:
    bench = Bench(max_tokens_per_step=10)
    for prompt in ([1, 2], [3, 4]):
        bench.add(prompt, num_drafts=5, max_tokens=20)
    bench.step()
    assert scheduled_of(bench.scheduler.schedule()) == [("0", 2, 1, 5), ("1", 2, 1, 3)]


def test_a_budget_below_the_number_of_sequences_serves_the_most_urgent() -> None:
    bench = Bench(max_tokens_per_step=2)
    for prompt in ([1], [2], [3]):
        bench.add(prompt, num_drafts=3, max_tokens=3)
    for _ in range(2):
        bench.step()
    assert scheduled_of(bench.scheduler.schedule()) == [("0", 2, 1, 0), ("1", 2, 1, 0)]


def test_no_more_is_drafted_than_is_left_to_generate() -> None:
    bench = Bench()
    bench.add([1, 2], num_drafts=5, max_tokens=4)
    bench.step()
    assert scheduled_of(bench.scheduler.schedule()) == [("0", 2, 1, 2)]


def test_drafts_shrink_before_a_sequence_is_preempted() -> None:
    bench = Bench(num_blocks=3)
    for prompt in ([1, 2], [3, 4]):
        bench.add(prompt, num_drafts=6, max_tokens=9)
    bench.step()
    assert scheduled_of(bench.scheduler.schedule()) == [("0", 2, 1, 5), ("1", 2, 1, 1)]
    assert bench.scheduler.num_preemptions == 0


def test_rejected_slots_are_written_again_by_the_next_pass() -> None:
    bench = Bench()
    sequence = bench.add([1, 2, 3], num_drafts=6, max_tokens=30)
    bench.step()
    bench.step(num_right=0)
    table = list(sequence.block_table)
    assert len(table) == 3, "the surplus stays reserved"
    batch = bench.scheduler.schedule()
    assert scheduled_of(batch) == [("0", 4, 1, 6)]
    assert list(sequence.block_table) == table
    bench.finish(batch)


def test_rejected_slots_are_freed() -> None:
    bench = Bench(num_blocks=4)
    first = bench.add([1, 2, 3], num_drafts=9, max_tokens=10)
    second = bench.add([4, 4, 4], max_tokens=10)
    bench.step()
    bench.step(num_right=0)
    assert len(first.block_table) == 3
    bench.step(num_right=0)
    assert bench.scheduler.num_preemptions == 0, "blocks of drafts are released before a preemption"
    assert second.num_output_tokens == 3


def test_the_least_urgent_sequence_is_preempted() -> None:
    bench = Bench(num_blocks=4)
    first, second = bench.add(range(6), max_tokens=10), bench.add(range(10, 13), max_tokens=10)
    for _ in range(5):
        bench.step()
    assert (first.status, second.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
    assert list(second.block_table) == []


def test_preempted_sequence_resumes_from_committed_tokens() -> None:
    bench = Bench(num_blocks=4)
    sequences = [bench.add(range(6), max_tokens=10), bench.add(range(10, 13), max_tokens=10, num_drafts=2)]
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    for sequence in sequences:
        assert bench.output(sequence) == expected_output(sequence.request, 1000)[0]


def test_cached_tokens_are_reported_as_of_the_first_admission() -> None:
    bench = Bench(num_blocks=6)
    bench.add(range(6), max_tokens=10)
    second = bench.add(range(10, 19), max_tokens=10)
    bench.run()
    assert bench.scheduler.num_preemptions > 0
    assert bench.blocks.num_hit_tokens > 0, "it reuses its own blocks after the preemption"
    assert second.num_cached_tokens == 0


def test_admission_never_deadlocks_on_blocks() -> None:
    bench = Bench(num_blocks=5, max_tokens_per_step=3)
    sequences = [bench.add(range(10 * i, 10 * i + 17), max_tokens=3) for i in range(4)]
    for _ in range(60):
        bench.step()
    assert all(bench.reason_of(sequence) is FinishReason.LENGTH for sequence in sequences)


def test_admission_leaves_a_block_for_each_running_sequence() -> None:
    bench = Bench(num_blocks=5)
    bench.add(range(8), max_tokens=8)
    bench.step()
    late = bench.add(range(100, 108), max_tokens=2)
    bench.run()
    assert bench.scheduler.num_preemptions == 0
    assert late.status is SequenceStatus.FINISHED


def test_a_sequence_may_fill_the_whole_pool() -> None:
    bench = Bench(num_blocks=3)
    sequence = bench.add(range(11), max_tokens=50)
    bench.run()
    assert len(sequence.token_ids) == 12


def test_abort_frees_blocks_in_the_same_step() -> None:
    bench = Bench()
    running, waiting = bench.add(range(20)), None
    bench.step()
    waiting = bench.add(range(20))
    chunk = bench.scheduler.abort(running.request_id)
    assert bench.blocks.num_free_blocks == bench.num_blocks
    assert chunk is not None
    assert (chunk.finish_reason, chunk.token_ids) == (FinishReason.ABORT, ())
    assert bench.scheduler.abort(waiting.request_id) is not None
    assert bench.scheduler.abort("unknown") is None
    assert not bench.scheduler.has_work


def test_an_aborted_prefill_leaves_only_what_it_computed() -> None:
    bench = Bench(max_tokens_per_step=8)
    gone = bench.add(range(20))
    bench.step()
    bench.scheduler.abort(gone.request_id)
    again = bench.add(range(20))
    bench.step()
    assert again.num_cached_tokens == 8
    bench.run()


def test_a_request_ends_when_its_time_is_over() -> None:
    bench = Bench(max_num_sequences=1)
    running = bench.add([1, 2], timeout_s=5.0, max_tokens=100)
    waiting = bench.add([3, 4], timeout_s=4.0)
    patient = bench.add([5, 6])
    bench.step()
    bench.now_s = 4.0
    assert [chunk.finish_reason for chunk in bench.step()] == [FinishReason.TIMEOUT, None]
    bench.now_s = 6.0
    last = bench.step()[0]
    assert (last.request_id, last.finish_reason) == (running.request_id, FinishReason.TIMEOUT)
    assert waiting.status is SequenceStatus.FINISHED
    bench.run()
    assert bench.reason_of(patient) is FinishReason.LENGTH


def test_a_deadline_does_not_outlive_its_request() -> None:
    bench = Bench()
    first = bench.add([1, 2], timeout_s=5.0, max_tokens=2)
    bench.run()
    again = sequence_of(first.request, 0, arrival_s=4.0)
    bench.scheduler.add(again)
    bench.now_s = 6.0
    bench.run()
    assert bench.reason_of(again) is FinishReason.LENGTH


def test_the_models_length_ends_a_sequence() -> None:
    bench = Bench(max_model_len=12)
    sequence = bench.add(range(10), max_tokens=100, num_drafts=8)
    bench.run()
    assert len(sequence.token_ids) == 12
    assert bench.reason_of(sequence) is FinishReason.LENGTH


def test_tokens_behind_a_stop_token_are_dropped() -> None:
    bench = Bench()
    plain = [next_token([1])]
    while len(plain) < 6:
        plain.append(next_token([1, *plain]))
    stop = plain[2]
    end = plain.index(stop) + 1
    sequence = bench.add([1], num_drafts=8, max_tokens=50, stop=[stop])
    bench.run()
    last = bench.chunks[-1]
    assert bench.output(sequence) == plain[:end]
    assert (last.finish_reason, last.stop_token_id, last.token_ids[-1]) == (FinishReason.STOP, stop, stop)
    assert len(last.logprobs) == len(last.token_ids)


def test_nothing_behind_a_stop_token_is_published() -> None:
    bench = Bench()
    sequence = bench.add([1], num_drafts=14, max_tokens=50)
    bench.step()
    batch = bench.scheduler.schedule()
    sequence.stop_token_ids = frozenset([next_token(sequence.token_ids)])
    bench.finish(batch)
    assert len(sequence.token_ids) == 3
    assert bench.blocks.cached_keys == frozenset()


def test_generated_blocks_are_found_by_the_next_turn() -> None:
    bench = Bench()
    first = bench.add(range(4), max_tokens=9)
    bench.run()
    second = bench.add([*first.token_ids, 1, 2, 3])
    bench.step()
    assert second.num_cached_tokens == 12


def test_stop_tokens_do_not_count_before_min_tokens() -> None:
    bench = Bench()
    sequence = bench.add([1], max_tokens=20, stop=range(V), min_tokens=4)
    bench.run()
    assert sequence.num_output_tokens == 5


def test_a_migrated_sequence_goes_on_where_it_was() -> None:
    whole = Bench()
    sequence = whole.add([1, 2], max_tokens=8)
    whole.run()
    output = whole.output(sequence)
    rest = Bench()
    moved = rest.add([1, 2], max_tokens=8, output=output[:3], num_drafts=3)
    rest.run()
    assert rest.output(moved) == output[3:]


def test_a_migrated_sequence_that_had_finished_only_says_so() -> None:
    bench = Bench()
    bench.add([1, 2], max_tokens=2, output=[3, 4])
    bench.add([1, 2], max_tokens=9, output=[3, 4], stop=[4])
    assert bench.scheduler.has_work
    reasons = [(chunk.token_ids, chunk.finish_reason) for chunk in bench.step()]
    assert reasons == [((), FinishReason.LENGTH), ((), FinishReason.STOP)]
    assert not bench.scheduler.has_work


def test_every_chunk_carries_the_sums_so_far() -> None:
    """A stop string can end a stream from outside, so the last chunk is not known in advance."""
    bench = Bench()
    bench.add([1, 2], num_drafts=3, max_tokens=7)
    bench.step()
    bench.step(num_right=1)
    bench.step(num_right=0)
    bench.step()
    assert [chunk.speculation.num_draft_tokens for chunk in bench.chunks if chunk.speculation] == [0, 3, 6, 8]
    stats = bench.chunks[-1].speculation
    assert stats is not None
    assert (stats.num_draft_tokens, stats.num_accepted_tokens, stats.accepted_histogram) == (8, 3, (1, 1, 1))


@pytest.mark.parametrize(
    ("prompt_len", "max_model_len", "num_blocks", "words"),
    [
        (0, 10, 4, ["no tokens", "at least 1"]),
        (10, 10, 4, ["10 tokens", "takes 10", "at most 9"]),
        (16, 100, 4, ["16 tokens", "holds 16", "at most 15", "memory_gib"]),
    ],
)
def test_a_prompt_that_can_never_fit_is_refused(
    prompt_len: int, max_model_len: int, num_blocks: int, words: list[str]
) -> None:
    bench = Bench(num_blocks=num_blocks, max_model_len=max_model_len)
    with pytest.raises(RequestError) as caught:
        bench.add([1] * prompt_len)
    assert all(word in caught.value.message for word in words)
    assert caught.value.param == "prompt"
    assert not bench.scheduler.has_work


def test_a_request_id_in_use_is_refused() -> None:
    bench = Bench()
    sequence = bench.add([1])
    with pytest.raises(RequestError, match="in use"):
        bench.scheduler.add(sequence)


def test_load_counts_what_is_queued_and_what_decodes() -> None:
    bench = Bench(max_tokens_per_step=8, max_num_sequences=2)
    for prompt in (range(3), range(100, 110), range(200, 206)):
        bench.add(prompt)
    bench.step()
    scheduler = bench.scheduler
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert scheduler.num_queued_prefill_tokens == 5 + 6
    assert scheduler.num_running_decode_tokens == 4


def test_queued_work_is_without_what_is_cached() -> None:
    bench = Bench(max_num_sequences=1)
    bench.add(range(12))
    bench.step()
    bench.add([*range(12), 100, 101])
    assert bench.scheduler.num_queued_prefill_tokens == 2


class SchedulerMachine(RuleBasedStateMachine):
    """Random requests, drafts, aborts and time-outs on a tiny pool; `expected_output` is the oracle."""

    @rule(
        num_blocks=st.integers(3, 12),
        max_num_sequences=st.integers(1, 5),
        max_tokens_per_step=st.integers(1, 24),
        max_model_len=st.integers(6, 40),
    )
    def restart(
        self,
        num_blocks: int,
        max_num_sequences: int,
        max_tokens_per_step: int,
        max_model_len: int,
    ) -> None:
        self.bench = Bench(num_blocks, max_num_sequences, max_tokens_per_step, max_model_len)
        self.longest = min(max_model_len, num_blocks * P)
        self.alive: dict[str, Sequence] = {}

    def __init__(self) -> None:
        super().__init__()
        self.restart(6, 3, 10, 20)

    @rule(
        prompt=st.builds(
            lambda size, tail: [*range(size), *tail], st.integers(1, 14), st.lists(st.just(0), max_size=4)
        ),
        max_tokens=st.integers(0, 12),
        num_drafts=st.integers(0, 6),
        priority=st.integers(0, 1),
        timeout_s=st.sampled_from([None, None, 3.0]),
        stop=st.lists(st.integers(0, V - 1), max_size=1),
        min_tokens=st.integers(0, 4),
        num_migrated=st.integers(0, 3),
        salt=st.sampled_from(["", "", "s"]),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        num_drafts: int,
        priority: int,
        timeout_s: float | None,
        stop: list[int],
        min_tokens: int,
        num_migrated: int,
        salt: str,
    ) -> None:
        if len(prompt) + 1 > self.longest:
            with pytest.raises(RequestError):
                self.bench.add(prompt)
            return
        whole = GenerateRequest(
            "", tuple(prompt), SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stop), min_tokens=min_tokens)
        )
        output = expected_output(whole, self.longest)[0][:num_migrated]
        sequence = self.bench.add(
            prompt,
            max_tokens=max_tokens,
            num_drafts=num_drafts,
            priority=priority,
            timeout_s=timeout_s,
            stop=stop,
            min_tokens=min_tokens,
            output=output,
            salt=salt,
        )
        self.alive[sequence.request_id] = sequence

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.alive:
            request_id = data.draw(st.sampled_from(sorted(self.alive)))
            if self.bench.scheduler.abort(request_id) is not None:
                del self.alive[request_id]

    @rule(seconds=st.floats(0.5, 2.0))
    def wait(self, seconds: float) -> None:
        self.bench.now_s += seconds

    @rule(num_steps=st.integers(1, 6), num_right=st.integers(0, 6))
    def steps(self, num_steps: int, num_right: int) -> None:
        for _ in range(num_steps):
            self._step(num_right)

    def _step(self, num_right: int) -> None:
        scheduler = self.bench.scheduler
        before = sorted((s for s in self.alive.values() if s.status is SequenceStatus.RUNNING), key=lambda s: s.urgency)
        batch = scheduler.schedule()
        self._check_plan(batch, before)
        for chunk in self.bench.finish(batch, num_right):
            if chunk.finish_reason is not None:
                self._check_end(chunk)

    def _check_plan(self, batch: Batch, before: list[Sequence]) -> None:
        num_tokens = sum(scheduled.num_tokens + scheduled.max_draft_tokens for scheduled in batch.scheduled)
        assert num_tokens <= self.bench.max_tokens_per_step
        assert [scheduled.is_sampled for scheduled in batch.scheduled] == sorted(
            (s.is_sampled for s in batch.scheduled), reverse=True
        )
        assert all(scheduled.max_draft_tokens >= 0 for scheduled in batch.scheduled)
        assert all(scheduled.is_sampled or scheduled.max_draft_tokens == 0 for scheduled in batch.scheduled)
        assert len({scheduled.sequence.request_id for scheduled in batch.scheduled}) == len(batch.scheduled)
        planned = [scheduled.sequence for scheduled in batch.scheduled]
        survivors = [sequence for sequence in before if sequence.status is not SequenceStatus.FINISHED]
        if survivors:
            assert survivors[0].status is SequenceStatus.RUNNING, "the most urgent sequence was preempted"
        is_anyone_left = any(s.status is not SequenceStatus.FINISHED for s in self.alive.values())
        assert bool(planned) == is_anyone_left, "there is work, but nothing is computed"

    def _check_end(self, chunk: TokenChunk) -> None:
        sequence = self.alive.pop(chunk.request_id)
        sent = [*sequence.request.output_token_ids, *self.bench.output(sequence)]
        expected, reason = expected_output(sequence.request, self.longest)
        assert sequence.token_ids[sequence.num_prompt_tokens :] == sent
        if chunk.finish_reason is FinishReason.TIMEOUT:
            assert sent == expected[: len(sent)]
        else:
            assert (sent, chunk.finish_reason) == (expected, reason)

    @invariant()
    def invariants_hold(self) -> None:
        self.bench.scheduler.check_integrity()

    def teardown(self) -> None:
        """After any sequence of events, the rest finishes in bounded time and every block is free again."""
        for _ in range(sum(80 + len(sequence.token_ids) for sequence in self.alive.values())):
            if not self.bench.scheduler.has_work:
                break
            self._step(num_right=1)
        assert not self.bench.scheduler.has_work
        assert self.bench.blocks.num_free_blocks == self.bench.num_blocks


TestSchedulerAgainstPlainDecoding = SchedulerMachine.TestCase
TestSchedulerAgainstPlainDecoding.settings = settings(max_examples=120, stateful_step_count=30)
