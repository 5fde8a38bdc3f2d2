"""The engine's step, and the queue in front of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.accounting.cost_model import DENSE, ExpertReads
from engine.accounting.draft_planning import Accounting
from engine.accounting.engine_stats import EngineStats, PositionLogStats, ReasoningStats
from engine.accounting.rates import RateMeter
from engine.accounting.record import PassRecord, SequencePass, passed_rows
from engine.accounting.request_limits import check_steps
from engine.accounting.step_times import StepTimer, StepTimes, timed
from engine.approximate.steps import StepSpeculation
from engine.config import SpeculationConfig
from engine.kv_cache.block_manager import BlockManager
from engine.model.draft_heads.loader import Head
from engine.position_log.position_log import PositionLog
from engine.proposer import Proposer
from engine.proposer.method_dispatcher import HybridProposer
from engine.proposer.own_proposers import HeadReport, LiveHead
from engine.sampling.grammar_compiler import GrammarCompiler
from engine.scheduler.async_scheduling import AsyncScheduling, InFlightBatch, Runner
from engine.scheduler.ending import explain_non_finite, plain_reason, score_prompts, token_sources
from engine.scheduler.scheduler import Scheduler
from engine.sequence.batch import (
    NOTHING,
    Batch,
    CheckedDraft,
    ScheduledSequence,
    check_draft,
    check_token_ids,
    constrain,
)
from engine.sequence.sequence import Sequence, SequenceStatus
from engine.verifier.verifier import Verifier
from engine.verifier.verify_task import VerifyResult
from protos.errors import EngineError
from protos.messages import GenerateRequest, TokenChunk

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Speculation:
    """The proposer and the verifier of an engine.

    Attributes:
        proposer: makes the drafts.
        verifier: accepts or rejects them.
        config: the limits of drafts.
        head: reads the model's hidden states. It is the proposer, or the proposer calls it.
        steps: speculates on reasoning steps, and is then both `proposer` and `verifier`; None if all requests are
            exact.
        overlap: issues passes ahead; None if each pass waits for the commit. It does not support heads or steps.
    """

    proposer: Proposer | StepSpeculation
    verifier: Verifier | StepSpeculation
    config: SpeculationConfig
    head: LiveHead | None = None
    steps: StepSpeculation | None = None
    overlap: AsyncScheduling | None = None


class EngineCore:
    """One model and its sequences. Tokens that `step` returns are committed and never taken back.

    Not thread-safe: one thread owns it. After a step has raised, the engine refuses to compute; build a new one.

    Attributes:
        on_computed: called with each batch when its KV is in the pool and before it is committed. The owner may set it.
        on_drafted: called before a pass with one chunk of drafts per request that asked to see them.
        position_log: logs verified positions; None if nothing is logged.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        speculation: Speculation,
        *,
        grammars: GrammarCompiler | None = None,
        position_log: PositionLog | None = None,
        model_name: str = "the model",
        experts: ExpertReads = DENSE,
    ) -> None:
        """Assemble an engine from its parts.

        Args:
            runner: the model.
            scheduler: plans over the runner's blocks and offers prompts to prefill engines. The engine uses its blocks,
                source, rates and clock.
            speculation: the proposer and the verifier.
            grammars: the compiler; None if the model has no tokenizer.
            position_log: logs verified positions; `close` closes it.
            model_name: the model and its dtype, for errors.
            experts: what rows read of the model's experts, for the cost of passes that were not seen yet.
        """
        self.runner = runner
        self.scheduler = scheduler
        self._accounting = Accounting(
            speculation.config, scheduler.rates, times_passes=not runner.can_overlap, experts=experts
        )
        self.on_computed: Callable[[Batch], None] = _ignore
        self.on_drafted: Callable[[list[TokenChunk]], None] = _ignore
        self.position_log = position_log
        self._speculation, self._overlap = speculation, speculation.overlap
        self._grammars = grammars or GrammarCompiler(None, runner.vocab_size, ())
        self._model_name, self._num_non_finite = model_name, 0
        self._timer = StepTimer()
        self._goes_on = False  # the last step has left work, and the next one begins at once
        self._is_broken = False
        self._is_starved = False
        if position_log is not None:
            self._accounting.observers.append(position_log.on_pass)

    @property
    def last_times(self) -> StepTimes:
        """The parts of the last step."""
        return self._accounting.times.last

    @property
    def rates(self) -> RateMeter:
        """The engine's measured speed."""
        return self._accounting.rates

    @property
    def blocks(self) -> BlockManager:
        """The manager of the runner's blocks."""
        return self.scheduler.blocks

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
            RequestError: its length, token ids, drafts or grammar are not usable here, or its id is in use.
        """
        self._check_alive()
        check_token_ids(request, self.runner.vocab_size)
        check_steps(request, self._speculation.steps is not None, self._speculation.config)
        rule = self._accounting.planning.rule(request)
        arrival_s = self.scheduler.clock() if arrival_s is None else arrival_s
        sequence = Sequence(request, rule, arrival_s, self._grammars.matcher(request))
        if self._accounting.planning.is_resting(sequence):
            sequence.draft_allowance = sequence.node_allowance = 0
        self.scheduler.add(sequence)
        if sequence.num_draft_tokens > 0:
            self._speculation.proposer.open(sequence)

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

    def exchange_head(self, head: Head, report: HeadReport | None = None) -> None:
        """Draft with another head from the next pass on. Call it between two steps.

        No head reads the KV of another one: cached prefixes are forgotten, and running sequences get no drafts of the
        new head. A head without KV drafts for them too.
        """
        assert self._speculation.head is not None, "it has a head to exchange"
        began_s = time.monotonic()
        self._speculation.head.exchange(head, report)
        if head.layer_shapes:
            self.scheduler.forget_prefixes()
        self.forget_draft()
        logger.info("heads exchanged between two steps in %.2f ms", 1e3 * (time.monotonic() - began_s))

    def forget_draft(self) -> None:
        """Discard the measurements of drafts, since another model makes them now. Call it on the engine's thread."""
        self._accounting.planning.forget_draft()
        if isinstance(self._speculation.proposer, HybridProposer):
            self._speculation.proposer.forget_draft()

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
            num_overlapped_passes=self._overlap.num_passes if self._overlap else 0,
            drafts=accounting.counters.drafts,
            times=accounting.times.total,
            prefill_tokens_per_s=accounting.rates.prefill_tokens_per_s,
            decode_slowdown=accounting.rates.decode_slowdown,
            decode_tokens_per_s=accounting.rates.decode_tokens_per_s,
            goodput=accounting.goodput.snapshot(),
            speedups=accounting.planning.speedups,
            remote=self.scheduler.source.stats,
            classes=accounting.counters.classes,
            drift=accounting.counters.drift,
            queue_times=self.scheduler.queue_times.snapshot(),
            prefill_times=self.scheduler.prefill_times.snapshot(),
            reasoning=ReasoningStats() if self._speculation.steps is None else self._speculation.steps.stats,
            log=PositionLogStats() if self.position_log is None else self.position_log.stats,
        )

    def close(self) -> None:
        """Abort all waiting and running requests. A second call does nothing."""
        for request_id in self.scheduler.request_ids:
            self.abort(request_id)
        if self.position_log is not None:
            self.position_log.close()

    def _step(self) -> list[TokenChunk]:
        # Tokens are sent between two steps: fewer passes for as many tokens save this time too.
        if self._goes_on:
            self._timer.lap("commit_s")
        else:
            self._timer.begin()
        issued = (self._overlap and self._overlap.take()) or self._issue()
        verified = self._verify(issued)
        self._keep_accepted(issued, verified)
        passes = [*map(SequencePass, issued.batch.sampled, issued.drafts, verified)]
        chunks = self._commit(issued, passes)
        self._observe(issued, passes)
        self._commit_to_proposer(issued.batch.sampled, chunks)
        self._plan_ahead()
        self._goes_on = self.has_work and not self._is_starved
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
        return self.scheduler.source.receive(lambda: self.scheduler.prefill_load)

    @timed("draft_s")
    def _write_steps(self) -> bool:
        return self._speculation.steps is not None and self._speculation.steps.write()

    @timed("schedule_s")
    def _schedule(self) -> Batch:
        return self.scheduler.schedule()

    @timed("draft_s")
    def _propose(self, batch: Batch) -> list[CheckedDraft]:
        """Return one draft per sampled sequence. Only sequences with room for drafts go to the proposer."""
        sampled = batch.sampled
        wanting = [scheduled for scheduled in sampled if scheduled.max_draft_tokens > 0]
        drafts = iter(self._speculation.proposer.propose(wanting) if wanting else ())
        checked = []
        for scheduled in sampled:
            if scheduled.max_draft_tokens == 0:
                checked.append(NOTHING)
                continue
            draft = check_draft(next(drafts), scheduled, self.runner.vocab_size)
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
        drawn = self._overlap.issue_next(issued, tasks) if self._overlap else None
        return self._speculation.verifier.verify(issued.logits, tasks) if drawn is None else drawn.results()

    @timed("forward_s")
    def _keep_accepted(self, issued: InFlightBatch, verified: Seq[VerifyResult]) -> None:
        """Move the KV of accepted drafts to its final slots, and pass their hidden states to the head."""
        self.runner.move(issued.compactions(verified))
        if (head := self._speculation.head) is not None and issued.batch.scheduled:
            head.learn(passed_rows(issued.batch, issued.num_drafts, verified))

    @timed("commit_s")
    def _commit(self, issued: InFlightBatch, passes: Seq[SequencePass]) -> list[TokenChunk]:
        self.on_computed(issued.batch)
        self._report_sources(passes)
        verified = [each.outcome for each in passes]
        chunks = self.scheduler.commit(issued.batch, issued.num_drafts, verified)
        self._num_non_finite += explain_non_finite(chunks, self._model_name)
        return chunks

    def _report_sources(self, passes: Seq[SequencePass]) -> None:
        """Record the source of each token for requests that ask for it, before the tokens are committed."""
        counters, planning = self._accounting.counters, self._accounting.planning
        for scheduled, draft, outcome in passes:
            if (report := scheduled.sequence.report) is not None:
                method = counters.method_of(draft, scheduled.sequence)
                reason = plain_reason(scheduled, draft, is_class_open=planning.is_open(scheduled.sequence))
                drafter = method if draft.shape in ("none", "chain") else f"{method}:{draft.shape}"
                report.record(token_sources(draft, outcome, method), drafter, reason)

    @timed("commit_s")
    def _observe(self, issued: InFlightBatch, passes: Seq[SequencePass]) -> None:
        """Give the record of the pass to all observers. Their own time counts for the next step."""
        record = PassRecord.of(
            issued.batch,
            passes,
            self._timer.take(),
            is_ahead=issued.is_ahead,
            is_followed=self._is_followed,
        )
        for observe in self._accounting.observers:
            observe(record)

    @timed("draft_s")
    def _commit_to_proposer(self, sampled: Seq[ScheduledSequence], chunks: Seq[TokenChunk]) -> None:
        """Report committed tokens to the proposer, except while an issued pass without drafts is still to come."""
        running = [each.sequence for each in sampled if each.sequence.status is SequenceStatus.RUNNING]
        grown = [sequence for sequence in running if sequence.num_wanted_drafts > 0]
        if grown and not self._is_followed:
            self._speculation.proposer.commit(grown)
        for chunk in chunks:
            if chunk.finish_reason is not None:
                self._forget(chunk.request_id)

    @timed("commit_s")
    def _plan_ahead(self) -> None:
        """Plan later drafts, while a draft process works on the next ones."""
        self._accounting.planning.plan_ahead()

    @property
    def _is_followed(self) -> bool:
        """True if the next pass is issued already."""
        return self._overlap is not None and self._overlap.has_pass

    def _forget(self, request_id: str) -> None:
        """Close an ended sequence in the proposer and the log, once all its tokens are committed."""
        self._speculation.proposer.close(request_id)
        if self.position_log is not None:
            self.position_log.end(request_id)

    def _check_alive(self) -> None:
        if self._is_broken:
            raise EngineError("the engine failed in an earlier step and computes nothing more; build a new one")


def _ignore(news: object) -> None:
    """Ignore a batch, or drafts."""
