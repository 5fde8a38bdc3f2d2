"""Plans the tokens that each sequence computes in the next step, and applies a step's outcome.

There is no prefill phase and no decode phase: the computed tokens of every sequence catch up with its committed ones.
The scheduler depends on no model, tensor or proposer, and its clock is injected.

    add -> WAITING -> admitted, with slots for all its tokens -> RUNNING -> ended: finished, aborted or timed out
              ^                                                     |
              +------- preempted: blocks released, tokens kept -----+
"""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from heapq import heappop, heappush
from itertools import count
from operator import attrgetter

from engine.accounting.engine_stats import WAIT_BUCKETS_S, Histogram
from engine.accounting.rates import RateMeter
from engine.config import SchedulerConfig
from engine.kv_cache.block_manager import BlockManager
from engine.remote_prefill.fetch_table import PrefillLoad, PrefillSource
from engine.scheduler.ending import (
    KeptTokens,
    check_prompt,
    chunk_of,
    finish,
    finished_before_start,
    keep_outcome,
    with_grammar,
)
from engine.scheduler.turns import FairQueue, MaskTurns, has_dear_masks
from engine.sequence.batch import Batch, ScheduledSequence
from engine.sequence.sequence import Sequence, SequenceStatus
from engine.verifier.verify_task import VerifyResult
from protos.errors import RequestError
from protos.messages import FinishReason, TokenChunk, TokenLogprobs

logger = logging.getLogger(__name__)

_MAX_SCORED_TOKENS = 256  # of one prompt in one step, since their logits are all in memory at once

_by_urgency = attrgetter("urgency")


class Scheduler:
    """Plans steps within a budget of tokens and a pool of blocks.

    Sequences moved from a lost pair are the most urgent, then the ones with the earliest turn (`FairQueue`). The
    rules:

    1. Verification comes first: a sequence that has caught up computes its last token and up to K drafts, or the nodes
       of a tree. Every last token gets its slot before any draft does; drafts shrink to fit the budget and the pool.
       If more sequences prefill than decode, nothing is drafted, since drafting would delay the prefills.
    2. Prefill chunks fill the budget, running sequences before new ones. While others decode, chunks take at most the
       time that `max_stall_passes` allows, as measured by `rates`.
    3. New sequences are admitted in order of urgency, without overtaking, while there are blocks for all their tokens
       and one spare block per running sequence. An idle pool fits every request that `add` accepts, so admission
       cannot deadlock.
    4. When a slot is missing, blocks reserved for drafts are released first, then the least urgent running sequence is
       preempted. The most urgent one is never preempted, so there is always progress.
    5. A grammar's next mask is computed before its sequence is scheduled. When the masks of a step have taken their
       time, the sequences with dearer masks wait, and the longest waiting goes on (`MaskTurns`).
    6. `source` may fetch blocks of a new sequence from a prefill engine. Meanwhile the sequence computes nothing, holds
       its slots and one token of the budget, and delays no other sequence.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        max_model_len: int,
        source: PrefillSource | None = None,
        clock: Callable[[], float] = time.monotonic,
        rates: RateMeter | None = None,
    ) -> None:
        self.num_preemptions = 0
        self.queue_times, self.prefill_times = Histogram(WAIT_BUCKETS_S), Histogram(WAIT_BUCKETS_S)
        self._max_num_sequences = min(config.max_num_sequences, blocks.max_sequences or config.max_num_sequences)
        self._max_tokens_per_step = config.max_tokens_per_step
        self._max_stall_passes = config.max_stall_passes
        self._max_model_len, self._num_slots = max_model_len, blocks.num_blocks * blocks.block_size
        self.blocks = blocks
        self.source = source or PrefillSource()
        self.rates = rates or RateMeter()
        self.clock = clock
        self._arrivals = count()
        self._turns = FairQueue()
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # most urgent first
        self._running: list[Sequence] = []  # most urgent first
        self._deadlines: list[tuple[float, int, str]] = []  # heap of (time, arrival, request id); may hold ended ones
        self._masks = MaskTurns()
        self._ended: list[TokenChunk] = []  # last chunks of sequences that ended outside `commit`

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def has_work(self) -> bool:
        """True while a step would compute or report something."""
        return bool(self._sequences or self._ended)

    @property
    def request_ids(self) -> Seq[str]:
        """Ids of all sequences that wait or run."""
        return tuple(self._sequences)

    @property
    def num_queued_prefill_tokens(self) -> int:
        """Tokens of waiting requests and running prefills that are not computed yet.

        Excludes tokens that were cached when their sequence joined the queue, and tokens being fetched.
        """
        num_waiting_tokens = sum(len(each.token_ids) - each.num_expected_tokens for each in self._waiting)
        return num_waiting_tokens + sum(sequence.num_uncomputed_tokens for sequence in self._prefilling())

    @property
    def num_running_decode_tokens(self) -> int:
        """Context tokens of the decoding sequences."""
        return sum(len(sequence.token_ids) for sequence in self._running if _is_ready(sequence))

    @property
    def prefill_load(self) -> PrefillLoad:
        """The queued work that one more prompt would wait for, and the decoding that it would delay."""
        decoding = [len(sequence.token_ids) for sequence in self._running if _is_ready(sequence)]
        num_queued_tokens = sum(sequence.num_uncomputed_tokens for sequence in self._prefilling())
        return PrefillLoad(num_queued_tokens, len(decoding), sum(decoding))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence. Its output is limited to the lengths that the model and the pool support.

        Raises:
            RequestError: its prompt is empty or too long, or its id is in use.
        """
        check_prompt(sequence.num_prompt_tokens, self._max_model_len, self._num_slots)
        if sequence.request_id in self._sequences:
            raise RequestError(
                f"request_id {sequence.request_id!r} is in use, and only 1 request may have it; choose another",
                param="request_id",
            )
        sequence.arrival = next(self._arrivals)
        max_output_tokens = min(self._max_model_len, self._num_slots) - sequence.num_prompt_tokens
        sequence.max_output_tokens = min(sequence.max_output_tokens, max_output_tokens)
        if end := finished_before_start(sequence):
            self._ended.append(finish(sequence, end))
            return
        self._sequences[sequence.request_id] = sequence
        sequence.turn = self._turns.turn(sequence.request, len(sequence.token_ids) + sequence.num_remaining_tokens)
        self._queue(sequence)
        if sequence.request.timeout_s is not None:
            deadline_s = sequence.arrival_s + sequence.request.timeout_s
            heappush(self._deadlines, (deadline_s, sequence.arrival, sequence.request_id))

    def abort(self, request_id: str) -> TokenChunk | None:
        """End a sequence. Its blocks are free when this returns.

        Returns its last chunk, without tokens, or None if the id is unknown (it may have just finished).
        """
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._end(sequence, KeptTokens((), FinishReason.ABORT))

    def schedule(self) -> Batch:
        """Plan one step, reserve all slots that it writes, and publish the prefixes that it completes.

        The step must then be computed and committed. Before the commit, `follow` may plan the next one; sequences added
        meanwhile wait, and aborted ones must be left out of the commit.
        """
        self._expire()
        ready, prefilling = self._secure_ready()
        is_crowded = self._is_crowded(len(ready), prefilling)
        going_on = self._masks.start_step([each for each in ready if not each.is_held])
        decodes = self._schedule_decodes(going_on, is_crowded=is_crowded)
        budget = self._max_tokens_per_step - len(ready) - sum([each.max_draft_rows for each in decodes])
        if decodes and self._max_stall_passes is not None:
            budget = int(min(budget, self.rates.chunk_tokens(self._max_stall_passes)))
        prefills = self._schedule_prefills(budget, prefilling)
        prefills.sort(key=lambda each: not each.is_sampled)
        return Batch((*decodes, *prefills), (*decodes, *[each for each in prefills if each.is_sampled]))

    def follow(self, batch: Batch) -> Batch | None:
        """Plan the step after `batch` before its tokens are known: one more token of each sequence that may go on.

        Its slots are reserved. Leave out sequences that end before it is committed. Returns None if `schedule` might
        plan a different step; then commit `batch` and call `schedule`.
        """
        sequences = [scheduled.sequence for scheduled in batch.sampled]
        if len(sequences) < self.num_running or self._has_news():
            return None
        if any(sequence.num_wanted_drafts > 0 for sequence in sequences):
            return None
        if not self._masks.fit(sequences):
            return None
        going_on = [sequence for sequence in sequences if sequence.num_remaining_tokens > 1]
        for sequence in going_on:
            # `schedule` could not publish these blocks, since a token was unknown.
            self.blocks.publish(sequence, len(sequence.token_ids))
        if not going_on or not all(self.blocks.reserve(each, len(each.token_ids) + 1) for each in going_on):
            return None
        scheduled = tuple(ScheduledSequence(each, len(each.token_ids), 1, 0) for each in going_on)
        return Batch(scheduled, scheduled)

    def commit(self, batch: Batch, num_drafts: Seq[int], verified: Seq[VerifyResult]) -> list[TokenChunk]:
        """Apply a step's outcome: the number of drafts and the verifier's result of each sampled sequence.

        Returns the new tokens of every sequence, and the last chunks of sequences that timed out. Rejected drafts need
        no cleanup: the next pass overwrites their slots.
        """
        chunks, self._ended = self._ended, []
        sampled = batch.sampled
        for scheduled in batch.scheduled[len(sampled) :]:
            scheduled.sequence.num_computed_tokens = scheduled.start + scheduled.num_tokens
            self.blocks.settle_states(scheduled.sequence)
            if scheduled.sequence.has_faulty_prompt:
                chunks.append(self._end(scheduled.sequence, KeptTokens((), FinishReason.NON_FINITE)))
        for scheduled, num_proposed, outcome in zip(sampled, num_drafts, verified, strict=True):
            chunks.append(self._commit_pass(scheduled.sequence, num_proposed, outcome))
        return chunks

    def forget_prefixes(self) -> None:
        """Let no sequence adopt a block that was computed so far."""
        self.blocks.forget_all(self._running)
        for sequence in self._waiting:
            sequence.num_expected_tokens = 0

    def check_integrity(self) -> None:
        """Assert the invariants between two steps; for tests."""
        self.blocks.check_integrity(self._running)
        assert self._running == sorted(self._running, key=_by_urgency)
        assert self._waiting == sorted(self._waiting, key=_by_urgency)
        assert {id(s) for s in [*self._running, *self._waiting]} == {id(s) for s in self._sequences.values()}
        assert all(s.status is SequenceStatus.RUNNING for s in self._running)
        assert all(s.status is SequenceStatus.WAITING and not s.block_table for s in self._waiting)
        assert all(s.num_uncomputed_tokens > 0 for s in self._sequences.values())
        assert all(s.num_remaining_tokens > 0 or s.is_scoring for s in self._sequences.values())
        assert len(self._running) <= self._max_num_sequences

    def _has_news(self) -> bool:
        """True if a sequence can be admitted, or has timed out."""
        if self._deadlines and self._deadlines[0][0] <= self.clock():
            return True
        if not self._waiting or self.num_running >= self._max_num_sequences:
            return False
        return self.blocks.can_admit(self._waiting[0], self.num_running)

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self.clock():
            _, arrival, request_id = heappop(self._deadlines)
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.arrival == arrival:  # else it has ended, and its id may be reused
                logger.info("request %s: timed out after %s s", sequence.request_id, sequence.request.timeout_s)
                self._ended.append(self._end(sequence, KeptTokens((), FinishReason.TIMEOUT)))

    def _secure_ready(self) -> tuple[list[Sequence], list[Sequence]]:
        """Return the ready sequences, each with a slot for its last token, and the running ones that still prefill.

        Ready sequences never exceed the budget: each was admitted while the budget had a token left for it.
        """
        size = self.blocks.block_size
        for sequence in [each for each in self._running if len(each.token_ids) > size * len(each.block_table)]:
            if _is_ready(sequence) and sequence.status is SequenceStatus.RUNNING:
                self._secure_slot(sequence)
        ready = [*filter(_is_ready, self._running)]
        if len(ready) == len(self._running):
            return ready, []
        return ready, [sequence for sequence in self._running if not _is_ready(sequence)]

    def _secure_slot(self, sequence: Sequence) -> None:
        num_tokens = len(sequence.token_ids)
        if self.blocks.reserve(sequence, num_tokens):
            return
        for other in self._running:
            self.blocks.trim(other, len(other.token_ids))
        while not self.blocks.reserve(sequence, num_tokens):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return

    def _is_crowded(self, num_ready: int, prefilling: Seq[Sequence]) -> bool:
        """True if some sequences decode and this step could prefill more than that, running and new ones together."""
        num_prefilling = sum([not sequence.is_fetching for sequence in prefilling])
        num_new = min(len(self._waiting), self._max_num_sequences - self.num_running)
        if not 0 < num_ready < num_prefilling + num_new:
            return False
        return num_ready < num_prefilling or self.blocks.can_admit(self._waiting[0], self.num_running)

    def _schedule_decodes(self, ready: list[Sequence], *, is_crowded: bool) -> list[ScheduledSequence]:
        budget, blocks, size = self._max_tokens_per_step - len(ready), self.blocks, self.blocks.block_size
        scheduled = []
        for sequence in ready:
            num_tokens = len(sequence.token_ids)
            # A seeded text may depend on K, so a sequence of fixed length drafts even in a crowd.
            has_none = (is_crowded or has_dear_masks(sequence)) and not sequence.has_fixed_length
            num_drafts = 0 if has_none else min(sequence.num_wanted_drafts, budget)
            num_nodes = min(sequence.node_allowance, budget) if num_drafts > 0 else 0
            num_rows = max(num_drafts, num_nodes)
            # Most sequences have slots already. Where the pool is short, the drafts shrink to the available ones.
            has_slots = num_tokens + num_rows <= size * len(sequence.block_table)
            if not has_slots and not blocks.reserve(sequence, num_tokens + num_rows):
                num_rows = blocks.num_available_slots(sequence) - num_tokens
                num_drafts, num_nodes = min(num_drafts, num_rows), min(num_nodes, num_rows)
                blocks.reserve(sequence, num_tokens + num_rows)
            num_drafts = min(num_drafts, blocks.plan_draft_states(sequence, num_drafts))
            budget -= num_rows
            if num_tokens >= size * (sequence.num_keyed_blocks + 1):
                blocks.publish(sequence, num_tokens)
            scheduled.append(ScheduledSequence(sequence, num_tokens - 1, 1, num_drafts, num_nodes))
        return scheduled

    def _schedule_prefills(self, budget: int, running: Seq[Sequence]) -> list[ScheduledSequence]:
        """Return prefill chunks, `running` sequences first.

        Chunks have no drafts: the draft model may still prefill the prompt, and the first token must not wait for it.

        A chunk ends before its sequence's last token only if it uses up the budget (then it is the last chunk), if its
        prompt's log-probabilities are requested, or if the step has no time for its grammar's mask.
        """
        scheduled: list[ScheduledSequence] = []
        candidates = self._prefill_candidates(running)
        while budget > 0 and (sequence := next(candidates, None)):
            if sequence.is_fetching:
                budget -= 1  # all running sequences must be able to sample in one step
                continue
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            if sequence.is_scoring:
                num_tokens = min(num_tokens, _MAX_SCORED_TOKENS)
            start = sequence.num_computed_tokens
            if start + num_tokens == len(sequence.token_ids) and not self._masks.has_mask(sequence):
                num_tokens -= 1
            if num_tokens == 0:
                continue
            self.blocks.publish(sequence, start + num_tokens)
            self.blocks.plan_chunk_states(sequence, start + num_tokens)
            scheduled.append(ScheduledSequence(sequence, start, num_tokens, 0))
            budget -= num_tokens
        return scheduled

    def _prefill_candidates(self, running: Seq[Sequence]) -> Iterator[Sequence]:
        """Yield the sequences to prefill: first the `running` ones, then new ones.

        A new sequence is admitted only when the iterator reaches it, so it can reuse blocks that were published for the
        sequences before it.
        """
        yield from running
        while self._waiting and self._admit(self._waiting[0]):
            sequence = self._waiting.pop(0)
            self._turns.serve(sequence.request, sequence.turn)
            self.source.offer(sequence, self.prefill_load)
            insort(self._running, sequence, key=_by_urgency)
            yield sequence

    def _admit(self, sequence: Sequence) -> bool:
        if self.num_running >= self._max_num_sequences or not self.blocks.admit(sequence, self.num_running):
            return False
        sequence.status = SequenceStatus.RUNNING
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            now_s = self.clock()
            self.queue_times.observe(max(0.0, now_s - sequence.arrival_s))
            sequence.clock.admit(now_s)
        return True

    def _prefilling(self) -> Iterator[Sequence]:
        """Iterate over the running sequences that this engine prefills."""
        return (sequence for sequence in self._running if not _is_ready(sequence) and not sequence.is_fetching)

    def _stop_fetching(self, sequence: Sequence) -> None:
        if sequence.is_fetching:
            self.source.withdraw(sequence)

    def _queue(self, sequence: Sequence) -> None:
        sequence.num_expected_tokens = self.blocks.num_cached_tokens(sequence)
        insort(self._waiting, sequence, key=_by_urgency)

    def _preempt(self, sequence: Sequence) -> None:
        """Put a sequence back into the queue with its committed tokens, which are its whole state.

        Its full blocks stay cached while the pool has room.
        """
        self._stop_fetching(sequence)
        logger.info("request %s: preempted at %d tokens, no free block", sequence.request_id, len(sequence.token_ids))
        self.blocks.publish(sequence, sequence.num_computed_tokens)
        self.blocks.release(sequence)
        self._running.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        self._queue(sequence)
        self.num_preemptions += 1

    def _commit_pass(self, sequence: Sequence, num_proposed: int, outcome: VerifyResult) -> TokenChunk:
        kept = keep_outcome(sequence, outcome)
        num_accepted = min(outcome.num_accepted, len(kept.token_ids))
        if outcome.is_exact:
            sequence.record_pass(num_proposed, num_accepted)
        sequence.append(kept.token_ids)
        kept = with_grammar(sequence, kept)
        sequence.num_computed_tokens = len(sequence.token_ids) - 1
        self.blocks.settle_states(sequence)
        if kept.token_ids and not sequence.clock.is_committed:
            self.prefill_times.observe(sequence.clock.commit(self.clock()))
        logprobs = outcome.logprobs[: len(kept.token_ids)]
        if kept.finish_reason is None:
            return chunk_of(sequence, kept, logprobs)
        return self._end(sequence, kept, logprobs)

    def _end(self, sequence: Sequence, kept: KeptTokens, logprobs: tuple[TokenLogprobs, ...] = ()) -> TokenChunk:
        """Remove the sequence. The KV of its committed tokens stays in the prefix cache, unless its logits failed."""
        if sequence.status is SequenceStatus.RUNNING:
            self._stop_fetching(sequence)
            if kept.finish_reason is FinishReason.NON_FINITE:
                self.blocks.retract(sequence, sequence.num_cached_tokens or 0)
            else:
                self.blocks.publish(sequence, sequence.num_computed_tokens)
            self.blocks.release(sequence)
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        del self._sequences[sequence.request_id]
        return finish(sequence, kept, logprobs)


def _is_ready(sequence: Sequence) -> bool:
    """True if all tokens but the last are computed, so the next pass samples."""
    return len(sequence.token_ids) - sequence.num_computed_tokens == 1 and not sequence.is_fetching
