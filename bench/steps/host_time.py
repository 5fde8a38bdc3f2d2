"""`python -m bench.steps.host_time`: the host's own time per step, beside a device that computes nothing.

The engine, its scheduler, its verifier and the recorded passes with the lists of work of the Triton kernel are the real
ones; the forward returns ready logits at once, drafts are all accepted, and tokens are drawn in no time: what the
kernels of the sampler are given is laid out as on a GPU, and they are not launched. On a GPU copies to the device and
launches come on top. Triton's interpreter finds the head sizes once, at the start. Every request has a seed of its own.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from torch import Tensor

from engine.accounting.step_times import StepTimes
from engine.attention.base import LayerOptions
from engine.attention.triton_attention import TritonAttention
from engine.batch.draft import Draft
from engine.batch.span import Span
from engine.config import GraphConfig, GraphKind, SchedulerConfig, SpeculationConfig
from engine.engine_core import EngineCore, Speculation
from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.compaction import KVMove
from engine.kv_cache.pool import KVCache, LayerShape
from engine.model.cuda_graphs.graph import ForwardOutput
from engine.model.cuda_graphs.graph_runner import CudaGraphRunner
from engine.model.forward_batch import ForwardBatch
from engine.proposer.dispatch.no_proposer import NoProposer
from engine.sampling.sampler import Sampler
from engine.scheduler.scheduler import Scheduler
from engine.sequence.draft_query import DraftQuery
from engine.verifier.verifier import Verifier
from protos.messages import GenerateRequest, SamplingParams

BLOCK_SIZE = 16
VOCAB_SIZE = 16
NUM_KV_HEADS = 8
GROUP_SIZE = 4
TOKEN_ID = 1
NUM_WARM_STEPS = 5


class InstantRunner:
    """A runner whose recorded passes are laid out in full and computed in no time."""

    vocab_size = VOCAB_SIZE
    can_overlap = False

    def __init__(self, batch: int, num_rows: int, num_blocks: int, max_model_len: int) -> None:
        shape = LayerShape(NUM_KV_HEADS, 16, 16)
        cache = KVCache([shape], num_blocks, BLOCK_SIZE, dtype=torch.float32, device=torch.device("cpu"))
        graphs = GraphConfig(GraphKind.EAGER, batches=(batch,), row_counts=(num_rows,))
        self._is_laying_out = True
        self._graphs = CudaGraphRunner(self._compute, cache, TritonAttention, graphs, max_model_len, VOCAB_SIZE)
        self._is_laying_out = False
        self._logits = torch.zeros(1 << 16, VOCAB_SIZE)
        self._logits[:, TOKEN_ID] = 1.0

    def _compute(self, batch: ForwardBatch, out: Tensor) -> ForwardOutput:
        if self._is_laying_out:
            num_rows = len(batch.input_ids)
            query = torch.zeros(1, NUM_KV_HEADS * GROUP_SIZE, num_rows, 16)
            key = torch.zeros(1, NUM_KV_HEADS, num_rows, 16)
            batch.attention.attend(0, query, key, key, LayerOptions(scaling=1.0))
            out[:, TOKEN_ID] = 1.0
        return ForwardOutput(out)

    def forward(self, spans: Seq[Span]) -> Tensor:
        """Logits of the spans' rows, a view; prompts, which are not recorded, are not laid out."""
        output = self._graphs.forward(spans)
        return self._logits[: sum(span.num_logits for span in spans)] if output is None else output.logits

    def move(self, moves: Seq[KVMove]) -> None:
        """Chains leave nothing to move."""


class InstantProposer(NoProposer):
    """Drafts that are all accepted."""

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        return [Draft((TOKEN_ID,) * each.max_draft_tokens) for each in queries]


def measure(
    batch: int, num_drafts: int, context: int, num_steps: int, sampling: SamplingParams
) -> tuple[list[StepTimes], list[float]]:
    """Time steps of `batch` sequences behind `context` tokens, `num_drafts` drafts each.

    Returns:
        The times of each step, and its seconds of processor time, which other processes do not add to.
    """
    max_tokens = (num_steps + NUM_WARM_STEPS + 4) * (num_drafts + 1)
    max_model_len = context + max_tokens + num_drafts + 1
    num_blocks = batch * (-(-max_model_len // BLOCK_SIZE) + 1) + 2
    runner = InstantRunner(batch, num_drafts + 1, num_blocks, max_model_len)
    blocks = BlockManager(num_blocks - 1, BLOCK_SIZE, "instant")
    scheduler = Scheduler(SchedulerConfig(batch, batch * context), blocks, max_model_len)
    verifier = Verifier(Sampler())
    speculation = Speculation(InstantProposer(), verifier, SpeculationConfig(num_drafts))
    engine = EngineCore(runner, scheduler, speculation)
    for index in range(batch):
        own = replace(sampling, seed=index)
        engine.add(GenerateRequest(str(index), (2,) * context, own, cache_salt=str(index)))
    times, processor_s = [], []
    gc.collect()
    gc.freeze()  # as what serves an engine does once it is loaded
    with _instant_kernels():
        for _ in range(NUM_WARM_STEPS + num_steps):
            began_s = time.process_time()
            engine.step()
            processor_s.append(time.process_time() - began_s)
            times.append(engine.last_times)
    engine.close()
    gc.unfreeze()
    return times[NUM_WARM_STEPS:], processor_s[NUM_WARM_STEPS:]


@contextmanager
def _instant_kernels() -> Iterator[None]:
    """Have the sampler lay out its kernels' work as on a GPU, and have the token without any work."""

    def draw(scores: Tensor, noise: object = None, edits: object = None) -> Tensor:
        return token_ids[: len(scores)]

    token_ids = torch.full((1 << 16,), TOKEN_ID)
    with (
        mock.patch("engine.sampling.sampler.runs_triton", return_value=True),
        mock.patch("engine.sampling.triton_draw.draw", draw),
    ):
        yield


def main() -> None:
    """Print a line for each batch and kind of sampling, in microseconds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = ("schedule_s", "draft_s", "forward_s", "sample_s", "commit_s", "total_s")
    print(f"K = {args.drafts}, {args.context} tokens of context, medians of {args.steps} steps in microseconds")
    names = [*(part.removesuffix("_s") for part in parts), "best", "cpu", "cpu best"]
    print(f"{'batch':>6} {'sampling':10}" + "".join(f"{name:>10}" for name in names))
    for batch in args.batches:
        for name, temperature in (("greedy", 0.0), ("sampled", 0.7)):
            max_tokens = (args.steps + NUM_WARM_STEPS + 4) * (args.drafts + 1)
            sampling = SamplingParams(temperature=temperature, max_tokens=max_tokens)
            times, processor_s = measure(batch, args.drafts, args.context, args.steps, sampling)
            seconds = [statistics.median(getattr(step, part) for step in times) for part in parts]
            seconds += [min(step.total_s for step in times), statistics.median(processor_s), min(processor_s)]
            print(f"{batch:6} {name:10}" + "".join(f"{1e6 * each:10.0f}" for each in seconds), flush=True)


if __name__ == "__main__":
    main()
