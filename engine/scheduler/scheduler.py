"""The tokens that each sequence computes in the next step, and the consequences of a step's outcome.

There is no prefill phase and no decode phase: every sequence has computed tokens that catch up with its committed ones.
The scheduler knows no model, no tensor and no proposer, and its clock is injected.

    add -> WAITING -> admitted, with slots for all its tokens -> RUNNING -> ended: finished, aborted or timed out
              ^                                                     |
              +------- preempted: blocks given back, tokens kept ---+
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

from engine.config import SchedulerConfig, TreeConfig
from engine.kv_cache.block_manager import BlockManager
from engine.remote_prefill.prefill_source import NoPrefillSource, PrefillLoad, PrefillSource
from engine.scheduler.ending import Cut, chunk_of, cut_outcome, finish, finished_before_start, with_grammar
from engine.scheduler.fair_queue import FairQueue
from engine.scheduler.length_limit import LengthLimit
from engine.sequence.batch import Batch, ScheduledSequence
from engine.sequence.sequence import Sequence, SequenceStatus
from engine.stats.histogram import WAIT_BUCKETS_S, Histogram
from engine.stats.rates import RateMeter
from engine.verifier.verify_result import VerifyResult
from protos.errors import RequestError
from protos.messages import FinishReason, TokenChunk, TokenLogprobs, has_own_weights

logger = logging.getLogger(__name__)

_MAX_SCORED_TOKENS = 256  # of one prompt in one step: their logits are all in memory at once

_by_urgency = attrgetter("urgency")


class Scheduler:
    """Plans steps within a budget of tokens and a pool of blocks.

    The more urgent of two sequences has moved here from a lost pair, or else has the earlier turn (`fair_queue`). The
    rules:

    1. Verification comes first: a sequence that has caught up computes its last token and up to K drafts, or the nodes
       of a `tree`. Every last token gets its slot before any draft does; drafts shrink to what budget and pool leave.
       There are none where more sequences have prompts to read than decode: making drafts would hold them up.
    2. Prefill chunks fill the budget, running sequences before new ones; while others decode, only as much of it as
       `rates` say they can wait for.
    3. New sequences are admitted in order of urgency, none overtakes, while there are blocks for all their tokens and
       one to spare per running sequence. An idle pool holds whatever `add` accepts: admission cannot deadlock.
    4. When a slot is missing, blocks kept for drafts are given back first; then the least urgent running sequence is
       preempted. The most urgent one never is, so there is always progress.
    5. `source` may bring blocks of a new sequence from elsewhere. Meanwhile it computes nothing, holds its slots and a
       token of the budget, and delays no other sequence.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        blocks: BlockManager,
        max_model_len: int,
        source: PrefillSource | None = None,
        tree: TreeConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        rates: RateMeter | None = None,
    ) -> None:
        self.num_preemptions = 0
        self.queue_times, self.prefill_times = Histogram(WAIT_BUCKETS_S), Histogram(WAIT_BUCKETS_S)
        self._tree = tree
        self._max_num_sequences = config.max_num_sequences
        self._max_tokens_per_step = config.max_tokens_per_step
        self._max_stall_passes = config.max_stall_passes
        self._limit = LengthLimit(max_model_len, blocks.num_blocks * blocks.block_size)
        self._blocks = blocks
        self._source = source or NoPrefillSource()
        self._rates = rates or RateMeter()
        self._clock = clock
        self._arrivals = count()
        self._turns = FairQueue()
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []  # most urgent first
        self._running: list[Sequence] = []  # most urgent first
        self._deadlines: list[tuple[float, int, str]] = []  # heap of (time, arrival, request id), of ended ones too
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
        """Tokens accepted and not yet computed, those of running prefills included.

        Tokens that were cached when their sequence joined the queue do not count, nor those that are being fetched.
        """
        num_waiting_tokens = sum(len(each.token_ids) - each.num_expected_tokens for each in self._waiting)
        return num_waiting_tokens + sum(sequence.num_uncomputed_tokens for sequence in self._prefilling())

    @property
    def num_running_decode_tokens(self) -> int:
        """Context tokens of the sequences that decode now."""
        return sum(len(sequence.token_ids) for sequence in self._running if _is_ready(sequence))

    @property
    def prefill_load(self) -> PrefillLoad:
        """The work that one more prompt would wait for here, and the work that would wait for it."""
        decoding = [len(sequence.token_ids) for sequence in self._running if _is_ready(sequence)]
        num_queued_tokens = sum(sequence.num_uncomputed_tokens for sequence in self._prefilling())
        return PrefillLoad(num_queued_tokens, len(decoding), sum(decoding))

    def add(self, sequence: Sequence) -> None:
        """Take a sequence into the queue; its output is limited to what the model and the pool can hold.

        Raises:
            RequestError: it can never be computed here, or its id is taken.
        """
        self._limit.check_prompt(sequence.num_prompt_tokens)
        if sequence.request_id in self._sequences:
            raise RequestError(
                f"request_id {sequence.request_id!r} is in use, and only 1 request may have it; choose another",
                param="request_id",
            )
        sequence.arrival = next(self._arrivals)
        max_output_tokens = self._limit.num_tokens - sequence.num_prompt_tokens
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
        """End a sequence now: its blocks are free when this returns.

        Returns its last chunk, without tokens, or None if the id is unknown (it may have just finished).
        """
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._end(sequence, Cut((), FinishReason.ABORT))

    def schedule(self) -> Batch:
        """Plan one step. All slots it writes are reserved, and the prefixes it completes are published.

        The step must then be computed and committed. In between `follow` may plan the next one; what is added meanwhile
        waits, and what is aborted is to be left out.
        """
        self._expire()
        ready, behind = self._secure_ready()
        is_crowded = self._is_crowded(len(ready), behind)
        decodes = self._schedule_decodes([each for each in ready if not each.is_held], is_crowded=is_crowded)
        budget = self._max_tokens_per_step - sum([1 + each.max_draft_rows for each in decodes])
        if decodes and self._max_stall_passes is not None:
            budget = int(min(budget, self._rates.chunk_tokens(self._max_stall_passes)))
        prefills = self._schedule_prefills(budget, behind)
        return Batch((*decodes, *prefills), (*decodes, *[each for each in prefills if each.is_sampled]))

    def follow(self, batch: Batch) -> Batch | None:
        """Plan the step after `batch`, whose tokens are not known yet: one more of each sequence that they may not end.

        Its slots are reserved. Before it is committed, sequences that have ended meanwhile are to be left
        out. None where the step might be another than this: commit `batch`, and call `schedule`.
        """
        sequences = [scheduled.sequence for scheduled in batch.sampled]
        if len(sequences) < self.num_running or self._has_news():
            return None
        if any(sequence.num_wanted_drafts > 0 for sequence in sequences):
            return None
        going_on = [sequence for sequence in sequences if sequence.num_remaining_tokens > 1]
        for sequence in going_on:
            # `schedule` could not publish these: a token was not known.
            self._blocks.publish(sequence, len(sequence.token_ids))
        if not going_on or not all(self._blocks.reserve(each, len(each.token_ids) + 1) for each in going_on):
            return None
        scheduled = tuple(ScheduledSequence(each, len(each.token_ids), 1, 0) for each in going_on)
        return Batch(scheduled, scheduled)

    def commit(self, batch: Batch, num_drafts: Seq[int], verified: Seq[VerifyResult]) -> list[TokenChunk]:
        """Apply a step's outcome: the number of drafts and the verifier's result of each sampled sequence.

        Returns the new tokens of every sequence, and the last chunks of those that timed out. Rejected drafts leave
        nothing behind: the next pass writes their slots again.
        """
        chunks, self._ended = self._ended, []
        sampled = batch.sampled
        for scheduled in batch.scheduled[len(sampled) :]:
            scheduled.sequence.num_computed_tokens = scheduled.start + scheduled.num_tokens
            if scheduled.sequence.has_faulty_prompt:
                chunks.append(self._end(scheduled.sequence, Cut((), FinishReason.NON_FINITE)))
        for scheduled, num_proposed, outcome in zip(sampled, num_drafts, verified, strict=True):
            chunks.append(self._commit_pass(scheduled.sequence, num_proposed, outcome))
        return chunks

    def check_integrity(self) -> None:
        """Assert what holds between two steps; for tests."""
        self._blocks.check_integrity(self._running)
        assert self._running == sorted(self._running, key=_by_urgency)
        assert self._waiting == sorted(self._waiting, key=_by_urgency)
        assert {id(s) for s in [*self._running, *self._waiting]} == {id(s) for s in self._sequences.values()}
        assert all(s.status is SequenceStatus.RUNNING for s in self._running)
        assert all(s.status is SequenceStatus.WAITING and not s.block_table for s in self._waiting)
        assert all(s.num_uncomputed_tokens > 0 for s in self._sequences.values())
        assert all(s.num_remaining_tokens > 0 or s.is_scoring for s in self._sequences.values())
        assert len(self._running) <= self._max_num_sequences

    def _has_news(self) -> bool:
        """True if a sequence can be admitted, or has to be ended."""
        if self._deadlines and self._deadlines[0][0] <= self._clock():
            return True
        if not self._waiting or self.num_running >= self._max_num_sequences:
            return False
        return self._blocks.can_admit(self._waiting[0], self.num_running)

    def _expire(self) -> None:
        while self._deadlines and self._deadlines[0][0] <= self._clock():
            _, arrival, request_id = heappop(self._deadlines)
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.arrival == arrival:  # else it has ended, and its id may be used again
                logger.info("request %s: timed out after %s s", sequence.request_id, sequence.request.timeout_s)
                self._ended.append(self._end(sequence, Cut((), FinishReason.TIMEOUT)))

    def _secure_ready(self) -> tuple[list[Sequence], list[Sequence]]:
        """Return the sequences that sample in this step in any case, each with a slot for its last token; the others.

        They never exceed the budget: each was admitted when it had a token left beside all that ran before.
        """
        size = self._blocks.block_size
        for sequence in [each for each in self._running if len(each.token_ids) > size * len(each.block_table)]:
            if _is_ready(sequence) and sequence.status is SequenceStatus.RUNNING:
                self._secure_slot(sequence)
        ready = [*filter(_is_ready, self._running)]
        if len(ready) == len(self._running):
            return ready, []
        return ready, [sequence for sequence in self._running if not _is_ready(sequence)]

    def _secure_slot(self, sequence: Sequence) -> None:
        num_tokens = len(sequence.token_ids)
        if self._blocks.reserve(sequence, num_tokens):
            return
        for other in self._running:
            self._blocks.trim(other, len(other.token_ids))
        while not self._blocks.reserve(sequence, num_tokens):
            victim = self._running[-1]
            self._preempt(victim)
            if victim is sequence:
                return

    def _is_crowded(self, num_ready: int, behind: Seq[Sequence]) -> bool:
        """True where sequences decode, and this step could read prompts of more: of those behind and of new ones."""
        num_behind = sum([not sequence.is_fetching for sequence in behind])
        num_new = min(len(self._waiting), self._max_num_sequences - self.num_running)
        if not 0 < num_ready < num_behind + num_new:
            return False
        return num_ready < num_behind or self._blocks.can_admit(self._waiting[0], self.num_running)

    def _schedule_decodes(self, ready: list[Sequence], *, is_crowded: bool) -> list[ScheduledSequence]:
        budget, blocks, size = self._max_tokens_per_step - len(ready), self._blocks, self._blocks.block_size
        scheduled = []
        for sequence in ready:
            num_tokens = len(sequence.token_ids)
            has_none = is_crowded and not sequence.has_fixed_length  # the text of such a seed may depend on lengths
            num_rows = num_drafts = 0 if has_none else min(sequence.num_wanted_drafts, budget)
            num_nodes = 0
            if self._tree is not None and num_drafts > 0:
                num_nodes = min(_num_tree_nodes(self._tree, sequence, len(ready)), budget)
                num_rows = max(num_drafts, num_nodes)
            has_slots = num_tokens + num_rows <= size * len(sequence.block_table)  # of most: a call less
            if not has_slots and not blocks.reserve(sequence, num_tokens + num_rows):
                num_rows = blocks.num_available_slots(sequence) - num_tokens
                num_drafts, num_nodes = min(num_drafts, num_rows), min(num_nodes, num_rows)
                blocks.reserve(sequence, num_tokens + num_rows)
            budget -= num_rows
            if num_tokens >= size * (sequence.num_keyed_blocks + 1):
                blocks.publish(sequence, num_tokens)
            scheduled.append(ScheduledSequence(sequence, num_tokens - 1, 1, num_drafts, num_nodes))
        return scheduled

    def _schedule_prefills(self, budget: int, running: Seq[Sequence]) -> list[ScheduledSequence]:
        """Return chunks without drafts, those of `running` first.

        A draft model may still read the prompt, and the first token must not wait.

        A chunk stops short of its sequence's last token only where it takes all that is left of the budget (so at most
        one does, and it is the last) or where its prompt's log-probabilities are wanted.
        """
        scheduled: list[ScheduledSequence] = []
        behind = self._behind(running)
        while budget > 0 and (sequence := next(behind, None)):
            if sequence.is_fetching:
                budget -= 1  # so that all that run could sample in one step
                continue
            num_tokens = min(sequence.num_uncomputed_tokens, budget)
            if sequence.is_scoring:
                num_tokens = min(num_tokens, _MAX_SCORED_TOKENS)
            start = sequence.num_computed_tokens
            self._blocks.publish(sequence, start + num_tokens)
            scheduled.append(ScheduledSequence(sequence, start, num_tokens, 0))
            budget -= num_tokens
        return scheduled

    def _behind(self, running: Seq[Sequence]) -> Iterator[Sequence]:
        """Yield the sequences with tokens to catch up, those that are `running` first.

        A new one is admitted only when it is asked for, and so can adopt what those before it have just published.
        """
        yield from running
        while self._waiting and self._admit(self._waiting[0]):
            sequence = self._waiting.pop(0)
            self._turns.serve(sequence.request, sequence.turn)
            self._source.offer(sequence, self.prefill_load)
            insort(self._running, sequence, key=_by_urgency)
            yield sequence

    def _admit(self, sequence: Sequence) -> bool:
        if self.num_running >= self._max_num_sequences or not self._blocks.admit(sequence, self.num_running):
            return False
        sequence.status = SequenceStatus.RUNNING
        if sequence.num_cached_tokens is None:
            sequence.num_cached_tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens)
            now_s = self._clock()
            self.queue_times.observe(max(0.0, now_s - sequence.arrival_s))
            sequence.clock.admit(now_s)
        return True

    def _prefilling(self) -> Iterator[Sequence]:
        """Iterate over the sequences that have tokens to catch up, and do it here."""
        return (sequence for sequence in self._running if not _is_ready(sequence) and not sequence.is_fetching)

    def _stop_fetching(self, sequence: Sequence) -> None:
        if sequence.is_fetching:
            self._source.withdraw(sequence)

    def _queue(self, sequence: Sequence) -> None:
        sequence.num_expected_tokens = self._blocks.num_cached_tokens(sequence)
        insort(self._waiting, sequence, key=_by_urgency)

    def _preempt(self, sequence: Sequence) -> None:
        """Put a sequence back into the queue with its committed tokens, which are its whole state.

        Its full blocks stay cached while there is room.
        """
        self._stop_fetching(sequence)
        logger.info("request %s: preempted at %d tokens, no free block", sequence.request_id, len(sequence.token_ids))
        self._blocks.publish(sequence, sequence.num_computed_tokens)
        self._blocks.release(sequence)
        self._running.remove(sequence)
        sequence.status = SequenceStatus.WAITING
        self._queue(sequence)
        self.num_preemptions += 1

    def _commit_pass(self, sequence: Sequence, num_proposed: int, outcome: VerifyResult) -> TokenChunk:
        cut = cut_outcome(sequence, outcome)
        num_accepted = min(outcome.num_accepted, len(cut.token_ids))
        if outcome.is_exact:
            sequence.record_pass(num_proposed, num_accepted)
        sequence.append(cut.token_ids)
        cut = with_grammar(sequence, cut)
        sequence.num_computed_tokens = len(sequence.token_ids) - 1
        if cut.token_ids and not sequence.clock.is_committed:
            self.prefill_times.observe(sequence.clock.commit(self._clock()))
        logprobs = outcome.logprobs[: len(cut.token_ids)]
        if cut.finish_reason is None:
            return chunk_of(sequence, cut, logprobs)
        return self._end(sequence, cut, logprobs)

    def _end(self, sequence: Sequence, cut: Cut, logprobs: tuple[TokenLogprobs, ...] = ()) -> TokenChunk:
        """Drop the sequence; what it computed of committed tokens stays in the prefix cache, but not what is faulty."""
        if sequence.status is SequenceStatus.RUNNING:
            self._stop_fetching(sequence)
            if cut.finish_reason is FinishReason.NON_FINITE:
                self._blocks.retract(sequence, sequence.num_cached_tokens or 0)
            else:
                self._blocks.publish(sequence, sequence.num_computed_tokens)
            self._blocks.release(sequence)
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        del self._sequences[sequence.request_id]
        return finish(sequence, cut, logprobs)


def _num_tree_nodes(tree: TreeConfig, sequence: Sequence, num_ready: int) -> int:
    return tree.num_nodes_for(num_ready, sequence.verify) if has_own_weights(sequence.method) else 0


def _is_ready(sequence: Sequence) -> bool:
    """True if it has caught up with its tokens, so its next pass samples."""
    return len(sequence.token_ids) - sequence.num_computed_tokens == 1 and not sequence.is_fetching
