"""Decodes and verifications of a few shapes, each recorded once at start and replayed from then on.

On a GPU a step of a large model is some hundreds of kernels of microseconds each; issued one by one, the host is late.
A recording keeps the addresses of weights, pool and buffers: none of them moves while the runner lives. The draft is
another process: its end, its return and its replacement change nothing here.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from tqdm import tqdm

from engine.attention.backend import is_batch_invariant, is_triton
from engine.attention.base import PlanAttention
from engine.batch.span import Span, SpanStates
from engine.config import GraphConfig
from engine.kv_cache.pool import KVCache
from engine.model.cuda_graphs.buckets import GraphBucket, fitting_bucket, graph_buckets
from engine.model.cuda_graphs.draft_steps import NUM_COMPARED, Advance, DraftSteps, HeadStates, steps_error
from engine.model.cuda_graphs.recorder import Compute, ForwardOutput, Record, recorder_of
from engine.model.cuda_graphs.static_batch import PlannedAttention, StaticAttention, StaticBatch
from engine.model.forward_batch import ForwardBatch, logit_rows
from engine.model.gpu_memory import enough_memory
from engine.sequence.sequence import ZEROS

logger = logging.getLogger(__name__)


_REMEDY = "lower cache.gpu_memory_utilization or scheduler.max_num_sequences, or set target.cuda_graphs to off"

Forward = Callable[[ForwardBatch, Tensor], ForwardOutput]  # a pass, and where its logits go


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One token of each span, in a recorded pass; `input_ids` [B] are filled in place before it is run."""

    input_ids: Tensor
    spans: Seq[Span]


_RecordedBatch = tuple[StaticBatch, Compute]  # a batch, and what computes it: a recording, or call by call


class CudaGraphRunner:
    """Recorded passes of one model over one pool; all write their logits to one buffer.

    Attributes:
        record: records its passes; None if they are computed call by call.
        vocab_size: columns of the logits.
    """

    def __init__(
        self,
        forward: Forward,
        cache: KVCache,
        plan_attention: PlanAttention,
        graphs: GraphConfig,
        max_model_len: int,
        vocab_size: int,
        record: Record | None = None,
        *,
        trial_pool_tokens: int | None = None,
    ) -> None:
        """Record every bucket of `graphs`; on a GPU this takes up to a second for each.

        A replay is compared with its computation, call by call, on other tokens than it was recorded with. A bucket
        where they differ (of a deterministic model: in any bit) is left out, and if the model cannot be recorded at
        all, no bucket is kept. Attention other than the Triton kernel's, and devices other than GPUs, have nothing to
        replay: passes are padded all the same, and computed call by call.

        Args:
            forward: the model's.
            cache: its last block is the scratch block of the padding, and belongs to no sequence.
            plan_attention: of the passes that are not recorded.
            graphs: the buckets.
            max_model_len: bounds the positions of all passes.
            vocab_size: columns of the logits.
            record: records a computation for replay, or raises RuntimeError; defaults to the device's own method.
            trial_pool_tokens: record only the largest bucket, and for drafts the largest decode, to see the memory that
                all of them take over a pool of so many tokens; None for all buckets over `cache`.

        Raises:
            ConfigError: the device has too little memory for the recordings.
        """
        self._forward, self._plan_attention, self._cache = forward, plan_attention, cache
        self._max_model_len, self._is_batch_invariant = max_model_len, is_batch_invariant(plan_attention)
        # The kernels of a replay are the same, libraries may choose among theirs.
        self._tolerance = 0.0 if self._is_batch_invariant else 0.03
        self._pool_tokens = trial_pool_tokens or cache.num_blocks * cache.block_size
        self._has_trees, self._device = graphs.has_trees, cache.device
        self._max_batch = max(graphs.batches, default=graphs.max_batch)
        self.vocab_size = vocab_size
        self._passes: dict[GraphBucket, _RecordedBatch] = {}
        self.record = record = record or recorder_of(graphs.kind, cache.device)
        # Buffers that all recordings share, as large as the largest bucket needs.
        largest_first = graph_buckets(graphs)[::-1]  # the others use the memory of the largest again
        max_rows = largest_first[0].num_rows if largest_first else 0
        self._logits = torch.zeros(max_rows, vocab_size, device=cache.device)
        num_blocks = self._max_batch * -(-max_model_len // cache.block_size) + max_rows
        self._block_tables = torch.zeros(num_blocks, dtype=torch.int32, device=cache.device)
        began_s = time.monotonic()
        if trial_pool_tokens is not None:
            decodes = [bucket for bucket in largest_first if bucket.rows_per_span == 1]
            largest_first = largest_first[:1] + decodes[: 1 if graphs.draft_ids_end else 0]
        self._record_all(largest_first, record)
        self._buckets = sorted(self._passes)
        self._draft_steps: dict[GraphBucket, DraftSteps] = {}
        logger.info("recorded %d passes in %.1f s", len(self._passes), time.monotonic() - began_s)

    @property
    def has_passes(self) -> bool:
        """True if there is anything to replay."""
        return bool(self._passes)

    def _record_all(self, buckets: Seq[GraphBucket], record: Record | None) -> None:
        scratch_block = self._cache.num_blocks - 1
        for bucket in tqdm(buckets, desc="recording decode and verification passes", disable=record is None):
            attention = self._static_attention(bucket)
            static = StaticBatch(bucket, self._cache, scratch_block, self._max_model_len, self._max_batch, attention)
            static.fill([Span([0], 0, [scratch_block], 1)])
            compute = partial(self._forward, static.batch, self._logits[: bucket.num_rows])
            with enough_memory(self._device, f"recorded passes of {bucket.num_rows} rows", _REMEDY):
                compute()  # attention finds its windows and head sizes
            if record is None:
                self._passes[bucket] = static, compute
                continue
            # Record, or fall back to plain passes for all buckets.
            try:
                with enough_memory(self._device, f"a recording of {bucket.num_rows} rows", _REMEDY):
                    replay = record(compute)
            except RuntimeError as error:
                logger.warning("passes are computed call by call, as this model's cannot be recorded: %s", error)
                self._passes.clear()
                return
            # Use the recording only if its replay repeats the pass.
            error_share = self._replay_error(static, bucket, compute, replay)
            if error_share <= self._tolerance:
                self._passes[bucket] = static, replay
            else:
                logger.warning("%s is computed call by call: its replay differs by %.1f%%", bucket, 100 * error_share)

    def record_steps(self, ids_end: int, states: HeadStates | None = None) -> None:
        """Record the steps of drafts with ids below `ids_end`, for each recorded decode of a model without states.

        They are compared with passes that the host lays out one by one, as each pass is with its replay.

        Args:
            ids_end: may be above the model's own ids.
            states: a head's, for the most rows of a pass, if it is a head that is recorded.

        Raises:
            ConfigError: the device has too little memory for the recordings.
        """
        if self._cache.states is not None:
            return
        num_ids = min(ids_end, self.vocab_size)

        def forward(spans: Seq[Span], input_ids: Tensor) -> Tensor:
            batch = ForwardBatch.of(spans, self._cache, self._plan_attention)
            batch.input_ids.copy_(input_ids)
            return self._forward(batch, self._logits[: len(spans)]).logits[:, :num_ids]

        num_steps = min(NUM_COMPARED, self._cache.block_size)
        probe = Span([0] * num_steps, 0, [self._cache.num_blocks - 1], num_steps)
        for bucket in [bucket for bucket in self._buckets if bucket.rows_per_span == 1]:
            logits = self._logits[: bucket.num_rows, :num_ids]
            own = None if states is None else states.head(bucket.num_rows)
            steps = DraftSteps(*self._passes[bucket], logits, own, has_kernels=is_triton(self._plan_attention))
            if self.record is not None:
                with enough_memory(self._device, f"recorded draws of {bucket.num_rows} rows", _REMEDY):
                    steps.record(partial(_recorded, self.record))
                error_share = steps_error(steps, [probe] * bucket.num_rows, forward, _error_share)
                if error_share > self._tolerance:
                    differing = "steps of %d drafts are computed call by call: recorded, they differ by %.1f%%"
                    logger.warning(differing, bucket.num_rows, 100 * error_share)
                    continue
            self._draft_steps[bucket] = steps

    def _replay_error(self, static: StaticBatch, bucket: GraphBucket, compute: Compute, replay: Compute) -> float:
        """Largest distance of a replay's row from the computed one, relative to its spread, on tokens of its own.

        The spans fill the bucket. All write to the one scratch block, so they are alike: a place has one token, and
        a GPU's order of writing rows does not matter.
        """
        scratch_block, block_size = self._cache.num_blocks - 1, self._cache.block_size
        rows = min(bucket.rows_per_span, block_size, bucket.num_rows)
        token_ids = [(5 + 3 * row) % self._logits.shape[1] for row in range(rows)]
        states = SpanStates(ZEROS, {})  # which models without recurrent layers do not read
        probe = Span(token_ids, block_size - rows, [scratch_block], rows, states=states)
        num_probes, num_left = divmod(bucket.num_rows, rows)
        rest = [probe._replace(token_ids=token_ids[:num_left], num_logits=num_left)] if num_left else []
        # Padding has left numbers of memory that nothing had written, which may not be finite.
        self._cache.import_blocks([scratch_block], torch.zeros_like(self._cache.export_blocks([scratch_block])))
        static.fill([*[probe] * num_probes, *rest])
        expected = compute().logits.clone()
        self._logits.zero_()
        found = replay().logits
        return _error_share(found, expected)

    def forward(self, spans: Seq[Span], input_ids: Tensor | None = None) -> ForwardOutput | None:
        """Compute a pass over `spans`; None if they fit no recording. The output is valid until the next call.

        `input_ids` [T], if given, replace the tokens of the spans.
        """
        recorded = self._fitting(spans)
        if recorded is None:
            return None
        static, replay = recorded
        if not static.fill(spans):
            return None
        num_rows = sum([len(span.token_ids) for span in spans])
        if input_ids is not None:
            static.batch.input_ids[:num_rows].copy_(input_ids)
        rows = logit_rows(spans, num_rows, self._device)
        output = replay().head(num_rows, num_rows)
        return output if rows is None else ForwardOutput(output.logits.index_select(0, rows), output.features)

    def plan_steps(self, spans: Seq[Span]) -> list[RecordedStep] | None:
        """As `ModelRunner.plan_steps`; None if there are more spans than in any recorded pass."""
        if self._bucket_of([span.at_step(0) for span in spans]) is None:
            return None
        input_ids = torch.zeros(len(spans), dtype=torch.long, device=self._device)
        num_steps = len(spans[0].token_ids)
        return [RecordedStep(input_ids, [span.at_step(step) for span in spans]) for step in range(num_steps)]

    def draft_steps(self, spans: Seq[Span]) -> DraftSteps | None:
        """Return the steps that compute the tokens of `spans` one after the other; None if they are not recorded."""
        bucket = self._bucket_of([span.at_step(0) for span in spans])
        return None if bucket is None else self._draft_steps.get(bucket)

    def _fitting(self, spans: Seq[Span]) -> _RecordedBatch | None:
        if not self._has_trees and any(span.parents for span in spans):
            return None
        bucket = self._bucket_of(spans)
        return None if bucket is None else self._passes[bucket]

    def _bucket_of(self, spans: Seq[Span]) -> GraphBucket | None:
        return fitting_bucket(spans, self._buckets) if len(spans) <= self._max_batch else None

    def _static_attention(self, bucket: GraphBucket) -> StaticAttention:
        if not is_triton(self._plan_attention):
            return PlannedAttention(self._cache, self._plan_attention)
        # Not at the top: processes without a GPU may have no Triton, and need none.
        from engine.model.cuda_graphs.static_attention import TiledAttention

        return TiledAttention(
            bucket,
            self._cache,
            self._block_tables,
            self._max_batch,
            has_trees=self._has_trees and bucket.rows_per_span > 1,
            batch_invariant=(self._max_model_len, self._pool_tokens) if self._is_batch_invariant else None,
        )


def _error_share(found: Tensor, expected: Tensor) -> float:
    """Return the largest distance of a row of logits from the expected one, relative to its spread."""
    is_equal = found == expected  # also where both are -inf: a masked token
    difference = (found - expected).masked_fill(is_equal, 0.0)
    finite = expected.where(expected.isfinite(), torch.nan)
    spread = (finite - finite.nanmean(dim=-1, keepdim=True)).nan_to_num().norm(dim=-1)
    share = float((difference.norm(dim=-1) / spread).max())
    return share if share == share else float("inf")  # noqa: PLR0124  # NaN is no agreement


def _recorded(record: Record, advance: Advance) -> Advance:
    replay = record(lambda: ForwardOutput(advance()))
    return lambda: replay().logits
