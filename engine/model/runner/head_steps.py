"""Recorded steps of a recurrent head (EAGLE-3, MTP): one small layer, whose launches take a host longer than a GPU."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from engine.attention.base import PlanAttention
from engine.config import GraphConfig
from engine.kv_cache.pool import KVCache
from engine.model.cuda_graphs.buckets import graph_buckets
from engine.model.cuda_graphs.draft_steps import HeadStates
from engine.model.cuda_graphs.graph_runner import CudaGraphRunner
from engine.model.cuda_graphs.recorder import ForwardOutput
from engine.model.draft_heads.eagle3 import Eagle3Head, ParallelEagleHead
from engine.model.draft_heads.head import DraftHead
from engine.model.draft_heads.mtp import MtpHead
from engine.model.forward_batch import ForwardBatch


def head_steps(
    head: DraftHead | None,
    cache: KVCache,
    plan_attention: PlanAttention,
    graphs: GraphConfig,
    max_model_len: int,
    passes: CudaGraphRunner,
    *,
    trial_pool_tokens: int | None = None,
) -> CudaGraphRunner | None:
    """Record the steps of `head` for as many sequences as a model's decodes in `graphs`; None for other heads.

    They share the memory of the model's `passes`. Other arguments are of `CudaGraphRunner`.

    Raises:
        ConfigError: the device has too little memory for the recordings.
    """
    if not isinstance(head, (Eagle3Head, MtpHead)) or isinstance(head, ParallelEagleHead):
        return None
    graphs = replace(graphs, row_counts=(1,), has_trees=False, draft_ids_end=passes.vocab_size)
    states = HeadStates(*(head.no_states(max(bucket.num_rows for bucket in graph_buckets(graphs))) for _ in range(2)))

    def forward(batch: ForwardBatch, out: Tensor) -> ForwardOutput:
        own = states.head(len(batch.input_ids))
        own.following.copy_(head.step(batch, own.current))
        return ForwardOutput(out.copy_(head.logits(own.following)))

    steps = CudaGraphRunner(
        forward,
        cache,
        plan_attention,
        graphs,
        max_model_len,
        passes.vocab_size,
        passes.record,
        trial_pool_tokens=trial_pool_tokens,
    )
    steps.record_steps(passes.vocab_size, states)
    return steps
