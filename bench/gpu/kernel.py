"""The attention kernel alone: the share of the device's bandwidth it reaches, on KV outside all caches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bench.gpu.floor import DeviceSpeed
from bench.gpu.plan import Plan
from bench.gpu.table import GpuResults, KernelLine, Missing
from bench.wide_fixture import WideShape
from engine.attention.base import LayerOptions
from engine.attention.triton_attention import TritonAttention, paged_attention
from engine.attention.triton_tiles import HeadShape
from engine.batch.span import Span
from engine.kv_cache.pool import KVCache, LayerShape
from engine.model.cuda_graphs.recorder import ForwardOutput, graph_recorder

_BLOCK_SIZE = 16
_POOL_BYTES = 8 << 30  # several times any cache, and more than one launch reads
_READ_BYTES = 4 << 30
_REPEATS = 7


def measure_speed() -> DeviceSpeed:
    """Measure reading by a reduction and moving by a copy, the better of the two, and a large bfloat16 product."""
    left, right = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product_s = _median_s(lambda: left @ right)
    return DeviceSpeed(_measure_bandwidth(), 2 * 8192**3 / product_s)


def _measure_bandwidth() -> float:
    memory = torch.ones(_READ_BYTES // 4, device="cuda")
    target = torch.empty_like(memory)
    read_s = _median_s(lambda: memory.amax())
    copy_s = _median_s(lambda: target.copy_(memory))
    return max(_READ_BYTES / read_s, 2 * _READ_BYTES / copy_s)


def measure_kernel(plan: Plan, results: GpuResults, speed: DeviceSpeed) -> None:
    """Measure decodes and verifications of every batch and context in bfloat16, decodes in float8 too."""
    deadline_s = time.monotonic() + plan.section_s
    cases = product((torch.bfloat16, torch.float8_e4m3fn), reversed(plan.contexts), plan.batches, (1, 8))
    for dtype, context, batch, rows in cases:
        if dtype.itemsize == 1 and rows > 1:
            continue
        name = f"{dtype}, batch {batch}, context {context}, rows {rows}"
        if time.monotonic() > deadline_s:
            results.add(Missing("kernel", name, "the section's time was up"))
            return
        results.attempt("kernel", name, partial(_add, results, plan.target, dtype, batch, context, rows, speed))


def _add(results: GpuResults, *case: Any) -> None:
    results.add(measure_attention(*case))


def measure_attention(
    shape: WideShape, kv_dtype: torch.dtype, batch: int, context: int, rows: int, speed: DeviceSpeed
) -> KernelLine:
    """Measure launches over one pool after the other, replayed without the host."""
    device = torch.device("cuda")
    layer = LayerShape(shape.num_kv_heads, shape.head_dim, shape.head_dim)
    blocks_each = -(-(context + rows) // _BLOCK_SIZE)
    num_blocks = batch * blocks_each
    pool_bytes = num_blocks * _BLOCK_SIZE * layer.num_elements * kv_dtype.itemsize
    num_pools = max(1, min(64, _POOL_BYTES // pool_bytes))
    cache = KVCache([layer], num_blocks, _BLOCK_SIZE, dtype=torch.bfloat16, device=device)
    order = torch.randperm(num_blocks).tolist()
    spans = [
        Span([0] * rows, context, order[index * blocks_each : (index + 1) * blocks_each], rows)
        for index in range(batch)
    ]
    plan = TritonAttention(spans, cache, slice(0, 1))
    group_size = shape.num_heads // shape.num_kv_heads
    launch = plan.launch(None, HeadShape(shape.num_kv_heads, group_size, shape.head_dim, shape.head_dim), itemsize=2)
    pools = [[torch.randn(cache.keys[0].shape, device=device).to(kv_dtype) for _ in range(2)] for _ in range(num_pools)]
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    if kv_dtype.itemsize == 1:
        ones = torch.ones(shape.num_kv_heads, device=device)
        scales = (ones, ones)
    query = torch.randn(batch * rows, shape.num_heads, shape.head_dim, dtype=torch.bfloat16, device=device)
    options = LayerOptions(shape.head_dim**-0.5)

    def compute() -> ForwardOutput:
        out: Tensor = query
        for keys, values in pools:
            out = paged_attention(query, keys, values, launch, options, scales)
        return ForwardOutput(out)

    seconds = _median_s(graph_recorder()(compute)) / num_pools
    num_bytes = batch * (context + rows) * layer.num_elements * kv_dtype.itemsize
    name = str(kv_dtype).removeprefix("torch.")
    rate = num_bytes / seconds
    return KernelLine(name, batch, context, rows, rate / 1e9, rate / speed.bytes_per_s)


def _median_s(call: Callable[[], object]) -> float:
    """Seconds of a call by the device's own clock."""
    call()
    times = []
    for _ in range(_REPEATS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        call()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended) / 1e3)
    return float(statistics.median(times))
