"""The engine: requests in, committed tokens out, one `step` at a time.

It needs no Ray and no server:

    from engine.config import EngineConfig, ModelConfig
    from engine.engine_core import EngineCore
    from protos.messages import GenerateRequest, SamplingParams

    core = EngineCore.from_config(EngineConfig(ModelConfig("models/demo/target")))
    prompt_token_ids = (1, 2, 3)  # what the model's tokenizer makes of a text
    core.add(GenerateRequest("first", prompt_token_ids, SamplingParams(temperature=0.0, max_tokens=8)))
    while core.has_work:
        for chunk in core.step():
            print(chunk.request_id, chunk.token_ids, chunk.finish_reason)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Protocol

from torch import Tensor

from engine.batch import Batch
from engine.block_manager import BlockManager, KvEventSink
from engine.checked_draft import NOTHING, CheckedDraft, check_draft
from engine.config import EngineConfig, SpeculationConfig
from engine.engine_stats import DraftCounters, EngineStats
from engine.model_runner import ModelRunner
from engine.proposer import Proposer
from engine.proposer.none import NoProposer
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.sequence import Sequence, SequenceStatus
from engine.span import Span
from engine.step_times import StepTimer, StepTimes
from engine.verifier import Verified, VerifyTask
from engine.verifier.verifier import Verifier
from engine.vocabulary import Vocabulary
from protos.errors import EngineError
from protos.messages import GenerateRequest, TokenChunk

logger = logging.getLogger(__name__)


class Runner(Protocol):
    """What the engine needs of a model; `engine.model_runner.ModelRunner` is the real one."""

    vocab_size: int

    def forward(self, spans: Seq[Span]) -> Tensor:
        """Logits `[R, V] float32` of the rows that the spans ask for, in span order."""


class EngineCore:
    """One model, its sequences and its truth: what `step` returns is committed and never taken back.

    Not thread-safe: `add`, `abort`, `step` and `stats` belong to one thread. After a step has raised, the engine's
    state is in doubt: it computes nothing more, and its owner builds a new one.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        blocks: BlockManager,
        proposer: Proposer,
        verifier: Verifier,
        speculation: SpeculationConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.blocks = blocks
        self.last_times = StepTimes()
        self._proposer = proposer
        self._verifier = verifier
        self._speculation = speculation
        self._vocabulary = Vocabulary(runner.vocab_size)
        self._clock = clock
        self._drafts = DraftCounters()
        self._total_times = StepTimes()
        self._is_broken = False

    @classmethod
    def from_config(
        cls, config: EngineConfig, proposer: Proposer | None = None, event_sink: KvEventSink | None = None
    ) -> EngineCore:
        """Load the model and assemble an engine around it; without a proposer every pass is plain decoding.

        Raises:
            ConfigError: the model, the pool or the limits cannot be had.
        """
        runner = ModelRunner(config.model, config.cache, config.scheduler.max_model_len)
        blocks = BlockManager(
            runner.num_blocks, runner.block_size, runner.model_version, event_sink, config.cache.enable_prefix_caching
        )
        scheduler = Scheduler(config.scheduler, blocks, runner.max_model_len)
        speculation = (
            config.speculation if proposer is not None else replace(config.speculation, num_tokens=0, max_num_tokens=0)
        )
        return cls(runner, scheduler, blocks, proposer or NoProposer(), Verifier(Sampler()), speculation)

    @property
    def has_work(self) -> bool:
        """True while `step` has something to compute or to report."""
        return self.scheduler.has_work

    def add(self, request: GenerateRequest, arrival_s: float | None = None) -> None:
        """Queue a request. Its time-out runs from `arrival_s` on the engine's clock, from now if None.

        Raises:
            RequestError: it can never be computed here: its length, its token ids, or its id is taken.
        """
        self._check_alive()
        self._vocabulary.check(request)
        sequence = Sequence(
            request,
            num_draft_tokens=_num_draft_tokens(request, self._speculation),
            verify=request.speculation.verify or self._speculation.verify,
            arrival_s=self._clock() if arrival_s is None else arrival_s,
        )
        self.scheduler.add(sequence)
        if sequence.num_draft_tokens > 0:
            self._proposer.open(sequence)

    def abort(self, request_id: str) -> TokenChunk | None:
        """End a request now; its blocks are free when this returns.

        Returns its last chunk, without tokens, or None if the id is unknown (it may have just finished).
        """
        chunk = self.scheduler.abort(request_id)
        if chunk is not None:
            self._proposer.close(request_id)
        return chunk

    def step(self) -> list[TokenChunk]:
        """Compute one pass and return every sequence's new tokens.

        A pass that fails is logged here, once, and raised: no sequence can be trusted after it.
        """
        self._check_alive()
        try:
            return self._step()
        except Exception:
            self._is_broken = True
            logger.exception("the step failed with %d sequences running; the engine stops", self.scheduler.num_running)
            raise

    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
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
            drafts=self._drafts.snapshot(),
            times=self._total_times,
        )

    def close(self) -> None:
        """Abort everything that waits or runs; a second call finds nothing to do."""
        for request_id in self.scheduler.request_ids:
            self.abort(request_id)

    def _step(self) -> list[TokenChunk]:
        timer = StepTimer()
        batch = self.scheduler.schedule()
        timer.lap("schedule_s")
        drafts = self._propose(batch)
        timer.lap("draft_s")
        logits = self.runner.forward(batch.spans([draft.token_ids for draft in drafts])) if batch.shares else None
        timer.lap("forward_s")
        verified = self._verify(batch, drafts, logits)
        timer.lap("sample_s")
        sampled = [share.sequence for share in batch.sampled]
        chunks = self.scheduler.commit(batch, [draft.num_valid for draft in drafts], verified)
        timer.lap("commit_s")
        self._tell_proposer(sampled, chunks)
        timer.lap("draft_s")
        self.last_times = timer.times()
        self._total_times += self.last_times
        return chunks

    def _propose(self, batch: Batch) -> list[CheckedDraft]:
        """One draft per sampled share; the proposer is asked only for those that have room for one."""
        wanting = [share for share in batch.sampled if share.max_draft_tokens > 0]
        drafts = iter(self._proposer.propose(wanting) if wanting else ())
        checked = []
        for share in batch.sampled:
            if share.max_draft_tokens == 0:
                checked.append(NOTHING)
                continue
            checked.append(check_draft(next(drafts), share.max_draft_tokens, self._vocabulary))
            self._drafts.num_invalid_tokens += checked[-1].is_cut
        return checked

    def _verify(self, batch: Batch, drafts: Seq[CheckedDraft], logits: Tensor | None) -> list[Verified]:
        tasks = []
        first_row = 0
        for share, draft in zip(batch.sampled, drafts, strict=True):
            tasks.append(VerifyTask(share.sequence, draft.draft, first_row))
            first_row += draft.num_valid + 1
        if logits is None or not tasks:
            return []
        verified = self._verifier.verify(logits, tasks)
        for draft, outcome in zip(drafts, verified, strict=True):
            self._drafts.record(draft.num_valid, outcome.num_accepted)
        return verified

    def _tell_proposer(self, sampled: Seq[Sequence], chunks: Seq[TokenChunk]) -> None:
        grown = [s for s in sampled if s.status is SequenceStatus.RUNNING and s.num_draft_tokens > 0]
        if grown:
            self._proposer.commit(grown)
        for chunk in chunks:
            if chunk.finish_reason is not None:
                self._proposer.close(chunk.request_id)

    def _check_alive(self) -> None:
        if self._is_broken:
            raise EngineError("the engine failed in an earlier step and computes nothing more; build a new one")


def _num_draft_tokens(request: GenerateRequest, deployment: SpeculationConfig) -> int:
    """K that a request gets: what it asks for, within what the deployment allows."""
    wish = request.speculation
    if not wish.enabled:
        return 0
    return deployment.num_tokens if wish.num_tokens is None else min(wish.num_tokens, deployment.max_num_tokens)
