"""The engine's step, and the queue in front of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from engine.accounting.accounting import Accounting
from engine.accounting.engine_stats import EngineStats, PositionLogStats, ReasoningStats
from engine.accounting.rates import RateMeter
from engine.accounting.record import PassRecord, SequencePass
from engine.accounting.request_limits import check_steps
from engine.accounting.step_times import StepTimer, StepTimes, timed
from engine.batch.span import Span
from engine.config import EngineConfig
from engine.engine_core.assembly import load_parts
from engine.engine_core.speculation import Speculation
from engine.kv_cache.block_manager import BlockManager, CacheDeltaSink
from engine.kv_cache.compaction import KVMove
from engine.position_log.position_log import PositionLog
from engine.proposer import Proposer
from engine.proposer.constrained_draft import constrain
from engine.proposer.passed_rows import passed_rows
from engine.remote_prefill.kv_transfer import KVTransport
from engine.remote_prefill.prefill_source import NoPrefillSource, PrefillSource
from engine.sampling.grammar_compiler import GrammarCompiler
from engine.sampling.vocabulary import Vocabulary
from engine.scheduler.async_scheduling import Overlap, SyncScheduling
from engine.scheduler.in_flight_batch import InFlightBatch
from engine.scheduler.pass_sources import plain_reason, token_sources
from engine.scheduler.prompt_logprobs import score_prompts
from engine.scheduler.scheduler import Scheduler
from engine.sequence.batch import Batch, ScheduledSequence
from engine.sequence.checked_draft import NOTHING, CheckedDraft, check_draft
from engine.sequence.sequence import Sequence, SequenceStatus
from engine.verifier.verify_result import VerifyResult
from protos.errors import EngineError
from protos.messages import FinishReason, GenerateRequest, TokenChunk

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """A model, as the engine uses it. `engine.model.runner.model_runner.ModelRunner` implements it."""

    vocab_size: int

    @property
    def can_overlap(self) -> bool:
        """True if `forward` may return before the device has computed the pass."""

    def forward(self, spans: Seq[Span]) -> Tensor:
        """Return the logits `[R, V] float32` of the spans' requested rows, in span order."""

    def move(self, moves: Seq[KVMove]) -> None:
        """Move KV to other slots before the next `forward`."""


class EngineCore:
    """One model and its sequences. Tokens that `step` returns are committed and never taken back.

    Not thread-safe: one thread owns it. After a step has raised, the engine refuses to compute; build a new one.

    Attributes:
        on_computed: called with each batch when its KV is in the pool and before it is committed. The owner may set it.
        on_drafted: called before a pass with one chunk of drafts per request that asked to see them.
        model_name: the model and its dtype, for errors. The owner may set it.
        position_log: logs verified positions; None if nothing is logged. The owner may set it; `close` closes it.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        blocks: BlockManager,
        speculation: Speculation,
        *,
        source: PrefillSource | None = None,
        rates: RateMeter | None = None,
        grammars: GrammarCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Assemble an engine from its parts.

        Args:
            runner: the model.
            scheduler: plans over `blocks` and offers prompts to `source`.
            blocks: manages the runner's blocks.
            speculation: the proposer and the verifier.
            source: fetches KV blocks from prefill engines; None if this engine prefills every prompt.
            rates: the meter that `source` reads; None creates one.
            grammars: the compiler; None if the model has no tokenizer.
            clock: returns seconds; requests time out on it.
        """
        self.runner = runner
        self.scheduler = scheduler
        self.blocks = blocks
        self._accounting = Accounting(speculation.config, rates, times_passes=not runner.can_overlap)
        self.on_computed: Callable[[Batch], None] = _ignore
        self.on_drafted: Callable[[list[TokenChunk]], None] = _ignore
        self.position_log: PositionLog | None = None
        self._source = source or NoPrefillSource()
        self._steps = speculation.steps
        self._proposer = speculation.proposer
        self._verifier = speculation.verifier
        self._head = speculation.head
        self._overlap: Overlap = speculation.overlap or SyncScheduling()
        self._speculation = speculation.config
        self._vocabulary = Vocabulary(runner.vocab_size)
        self._grammars = grammars or GrammarCompiler(None, runner.vocab_size, ())
        self._clock = clock
        self.model_name = "the model"
        self._num_non_finite = 0
        self._timer = StepTimer()
        self._is_broken = False
        self._is_starved = False

    @classmethod
    def from_config(
        cls,
        config: EngineConfig,
        proposer: Proposer | None = None,
        event_sink: CacheDeltaSink | None = None,
        transport: KVTransport | None = None,
        step_writer: Proposer | None = None,
        models: Mapping[str, Proposer] | None = None,
    ) -> EngineCore:
        """Load the model and assemble an engine around it.

        Args:
            config: the model, its head, the pool and the limits.
            proposer: drafts, unless the configuration has a head. With neither, every pass is plain decoding.
            event_sink: receives the changes of the prefix cache.
            transport: fetches KV from prefill engines; None if this engine prefills every prompt.
            step_writer: writes reasoning steps where the configuration allows them; None uses the proposer. A head
                cannot write them, since it drafts from the target's hidden states.
            models: draft models that serve together with a head, by method name.

        Raises:
            ConfigError: the model, its head, the pool or the limits are not usable.
        """
        parts = load_parts(config, proposer, event_sink, transport, step_writer, models or {})
        core = cls(
            parts.runner,
            parts.scheduler,
            parts.blocks,
            parts.speculation,
            source=parts.source,
            rates=parts.rates,
            grammars=parts.grammars,
        )
        core.position_log = parts.position_log
        core.model_name = f"{Path(config.model.path).name} in {parts.runner.kv_layout.dtype.removeprefix('torch.')}"
        return core

    @property
    def last_times(self) -> StepTimes:
        """The parts of the last step."""
        return self._accounting.times.last

    @property
    def rates(self) -> RateMeter:
        """The engine's measured speed."""
        return self._accounting.rates

    @property
    def has_work(self) -> bool:
        """True while `step` has something to compute or to report."""
        return self.scheduler.has_work

    @property
    def is_starved(self) -> bool:
        """True if the last step computed nothing, since all sequences wait for blocks from prefill engines."""
        return self._is_starved and self.has_work

    def prepare(self, request: GenerateRequest) -> Future[Any] | None:
        """Start compiling the request's grammar in a worker thread. Optional.

        Returns:
            A future; once it is done, `add` does not wait. None if `add` would not wait now.

        Raises:
            OverloadedError: too many grammars wait to be compiled.
        """
        return self._grammars.prepare(request)

    def add(self, request: GenerateRequest, arrival_s: float | None = None) -> None:
        """Queue a request. Its time-out starts at `arrival_s` on the engine's clock, or now if that is None.

        Raises:
            RequestError: its length, token ids or grammar are not usable here, or its id is in use.
        """
        self._check_alive()
        self._vocabulary.check(request)
        check_steps(request, self._steps is not None, self._speculation)
        sequence = Sequence(
            request,
            self._accounting.planning.rule(request),
            self._clock() if arrival_s is None else arrival_s,
            self._grammars.matcher(request),
        )
        self.scheduler.add(sequence)
        if sequence.num_draft_tokens > 0:
            self._proposer.open(sequence)

    def abort(self, request_id: str) -> TokenChunk | None:
        """End a request. Its blocks are free when this returns.

        Returns its last chunk, without tokens, or None if the id is unknown (it may have just finished).
        """
        chunk = self.scheduler.abort(request_id)
        if chunk is not None:
            self._forget(request_id)
        return chunk

    def step(self) -> list[TokenChunk]:
        """Return every sequence's new tokens from one pass. The next pass may already be issued.

        A failed pass is logged here, once, and raised: it leaves no sequence in a known state.
        """
        self._check_alive()
        try:
            return self._step()
        except Exception:
            self._is_broken = True
            logger.exception("the step failed with %d sequences running; the engine stops", self.scheduler.num_running)
            raise

    def forget_draft(self) -> None:
        """Discard the measurements of drafts, since another model makes them now. Call it on the engine's thread."""
        self._accounting.planning.forget_draft()

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters."""
        accounting = self._accounting
        return EngineStats(
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
            num_queued_prefill_tokens=self.scheduler.num_queued_prefill_tokens,
            num_running_decode_tokens=self.scheduler.num_running_decode_tokens,
            num_blocks=self.blocks.num_blocks,
            num_used_blocks=self.blocks.num_blocks - self.blocks.num_free_blocks,
            num_prefix_queried_tokens=self.blocks.num_queried_tokens,
            num_prefix_hit_tokens=self.blocks.num_hit_tokens,
            num_preemptions=self.scheduler.num_preemptions,
            num_non_finite_requests=self._num_non_finite,
            num_overlapped_passes=self._overlap.num_passes,
            drafts=accounting.counters.drafts,
            times=accounting.times.total,
            prefill_tokens_per_s=accounting.rates.prefill_tokens_per_s,
            decode_slowdown=accounting.rates.decode_slowdown,
            decode_tokens_per_s=accounting.rates.decode_tokens_per_s,
            goodput=accounting.goodput.snapshot(),
            speedups=accounting.planning.speedups,
            remote=self._source.stats,
            classes=accounting.counters.classes,
            drift=accounting.counters.drift,
            queue_times=self.scheduler.queue_times.snapshot(),
            prefill_times=self.scheduler.prefill_times.snapshot(),
            reasoning=ReasoningStats() if self._steps is None else self._steps.stats,
            log=PositionLogStats() if self.position_log is None else self.position_log.stats,
        )

    def close(self) -> None:
        """Abort all waiting and running requests. A second call does nothing."""
        for request_id in self.scheduler.request_ids:
            self.abort(request_id)
        if self.position_log is not None:
            self.position_log.close()

    def _step(self) -> list[TokenChunk]:
        self._timer.begin()
        issued = self._overlap.take() or self._issue()
        verified = self._verify(issued)
        self._keep_accepted(issued, verified)
        passes = [*map(SequencePass, issued.batch.sampled, issued.drafts, verified)]
        chunks = self._commit(issued, passes)
        self._observe(issued, passes)
        self._commit_to_proposer(issued.batch.sampled, chunks)
        return chunks

    def _issue(self) -> InFlightBatch:
        """Schedule, propose and forward: issue the next pass to the device."""
        has_progress = any([self._receive(), self._write_steps()])
        batch = self._schedule()
        drafts = self._propose(batch)
        self._show_drafts(batch, drafts)
        logits = self._forward(batch, drafts)
        self._is_starved = not (has_progress or batch.scheduled)
        return InFlightBatch(batch, drafts, logits)

    @timed("receive_s")
    def _receive(self) -> bool:
        return self._source.receive(lambda: self.scheduler.prefill_load)

    @timed("draft_s")
    def _write_steps(self) -> bool:
        return self._steps is not None and self._steps.write()

    @timed("schedule_s")
    def _schedule(self) -> Batch:
        return self.scheduler.schedule()

    @timed("draft_s")
    def _propose(self, batch: Batch) -> list[CheckedDraft]:
        """Return one draft per sampled sequence. Only sequences with room for drafts go to the proposer."""
        sampled = batch.sampled
        wanting = [scheduled for scheduled in sampled if scheduled.max_draft_tokens > 0]
        drafts = iter(self._proposer.propose(wanting) if wanting else ())
        checked = []
        for scheduled in sampled:
            if scheduled.max_draft_tokens == 0:
                checked.append(NOTHING)
                continue
            draft = check_draft(next(drafts), scheduled, self._vocabulary)
            matcher = scheduled.sequence.matcher
            checked.append(draft if matcher is None else constrain(draft, scheduled.max_draft_tokens, matcher))
        return checked

    def _show_drafts(self, batch: Batch, drafts: Seq[CheckedDraft]) -> None:
        """Send the drafts of this pass to the requests that want to see them; of a tree, the first branch."""
        shown = [
            TokenChunk(
                each.sequence.request_id, (), draft_ids=draft.first_branch, offset=each.sequence.num_output_tokens
            )
            for each, draft in zip(batch.sampled, drafts, strict=True)
            if draft.num_valid > 0 and each.sequence.request.returns_drafts
        ]
        if shown:
            self.on_drafted(shown)

    @timed("forward_s")
    def _forward(self, batch: Batch, drafts: Seq[CheckedDraft]) -> Tensor | None:
        return self.runner.forward(batch.spans([draft.computed for draft in drafts])) if batch.scheduled else None

    @timed("sample_s")
    def _verify(self, issued: InFlightBatch) -> list[VerifyResult]:
        """Verify the drafts. If the next pass needs only the tokens drawn here, issue it before reading them."""
        tasks = issued.tasks()  # before scoring, which changes `num_scored_rows` and so the tasks' first rows
        if issued.logits is None:
            return []
        score_prompts(issued.logits, issued.batch, issued.num_drafts)
        if not tasks:
            return []
        if self.position_log is not None:
            # Copy first: a pass that is issued meanwhile overwrites the logits.
            self.position_log.copy(issued.logits, tasks, issued.num_drafts)
        drawn = self._overlap.issue_next(issued, tasks)
        return self._verifier.verify(issued.logits, tasks) if drawn is None else drawn.results()

    @timed("forward_s")
    def _keep_accepted(self, issued: InFlightBatch, verified: Seq[VerifyResult]) -> None:
        """Move the KV of accepted drafts to its final slots, and pass their hidden states to the head."""
        self.runner.move(issued.compactions(verified))
        if self._head is not None and issued.batch.scheduled:
            self._head.learn(passed_rows(issued.batch, issued.num_drafts, verified))

    @timed("commit_s")
    def _commit(self, issued: InFlightBatch, passes: Seq[SequencePass]) -> list[TokenChunk]:
        self.on_computed(issued.batch)
        self._report_sources(passes)
        verified = [each.outcome for each in passes]
        chunks = self.scheduler.commit(issued.batch, issued.num_drafts, verified)
        self._explain_faults(chunks)
        return chunks

    def _explain_faults(self, chunks: Seq[TokenChunk]) -> None:
        """Log, count and explain each sequence that ends because its logits are not finite."""
        for chunk in chunks:
            if chunk.finish_reason is FinishReason.NON_FINITE:
                self._num_non_finite += 1
                chunk.error = (
                    f"{self.model_name} computed NaN or infinite logits after {chunk.offset} tokens of the answer, "
                    "which ends there: its numbers overflow on this text. A retry gives the same; set target.dtype "
                    "to bfloat16 or float32, which hold larger numbers than float16"
                )
                logger.warning("request %s: %s", chunk.request_id, chunk.error)

    def _report_sources(self, passes: Seq[SequencePass]) -> None:
        """Record the source of each token for requests that ask for it, before the tokens are committed."""
        counters, planning = self._accounting.counters, self._accounting.planning
        for scheduled, draft, outcome in passes:
            if (report := scheduled.sequence.report) is not None:
                method = counters.method_of(draft, scheduled.sequence)
                reason = plain_reason(scheduled, draft, is_class_open=planning.is_open(scheduled.sequence))
                report.record(token_sources(draft, outcome, method), method, reason)

    @timed("commit_s")
    def _observe(self, issued: InFlightBatch, passes: Seq[SequencePass]) -> None:
        """Give the record of the pass to all observers. Their own time counts for the next step."""
        record = PassRecord.of(
            issued.batch,
            passes,
            self._timer.take(),
            is_ahead=issued.is_ahead,
            is_followed=self._overlap.has_pass,
        )
        for observer in self._accounting.observers:
            observer.on_pass(record)
        if self.position_log is not None:
            self.position_log.on_pass(record)

    @timed("draft_s")
    def _commit_to_proposer(self, sampled: Seq[ScheduledSequence], chunks: Seq[TokenChunk]) -> None:
        """Report committed tokens to the proposer, except while an issued pass without drafts is still to come."""
        running = [each.sequence for each in sampled if each.sequence.status is SequenceStatus.RUNNING]
        grown = [sequence for sequence in running if sequence.num_wanted_drafts > 0]
        if grown and not self._overlap.has_pass:
            self._proposer.commit(grown)
        for chunk in chunks:
            if chunk.finish_reason is not None:
                self._forget(chunk.request_id)

    def _forget(self, request_id: str) -> None:
        """Close an ended sequence in the proposer and the log, once all its tokens are committed."""
        self._proposer.close(request_id)
        if self.position_log is not None:
            self.position_log.end(request_id)

    def _check_alive(self) -> None:
        if self._is_broken:
            raise EngineError("the engine failed in an earlier step and computes nothing more; build a new one")


def _ignore(news: object) -> None:
    """Ignore a batch, or drafts."""
