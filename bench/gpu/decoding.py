"""The decoding lines of the GPU bench: every mode, batch and context that fits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

from bench.gpu.engine import Cell, CellLimits, DecodeMode, GpuBench, drafting, source_text
from bench.gpu.floor import DeviceSpeed, most_tokens
from bench.gpu.plan import Plan
from bench.gpu.table import GpuResults, Missing
from engine.config import CacheConfig, ModelConfig, ModelDtype

OTHER_BYTES = 10e9  # of two processes' kernels, recordings and logits
BLOCK_SIZE = 16
MODES = (
    DecodeMode("plain"),
    DecodeMode("sync", 4),
    DecodeMode("async", 4, is_ahead=True),
    DecodeMode("tree", 4, tree_nodes=8),
    DecodeMode("waiting", overlaps=False),  # plain, the host seeing every token before the next pass
)


def measure_decoding(plan: Plan, results: GpuResults, speed: DeviceSpeed, folders: tuple[Path, Path]) -> None:
    """Load the target once, and measure it with the draft of each mode; `folders` are target's and draft's."""
    modes = [mode for mode in MODES if mode.name in plan.sections]
    if not modes:
        return
    dtype = ModelDtype(str(plan.dtype).removeprefix("torch."))
    target, draft = (ModelConfig(str(folder), dtype, plan.device.type) for folder in folders)
    num_blocks = _num_blocks(plan)
    cache = CacheConfig(num_blocks=num_blocks, dtype=plan.kv_kind)
    bench = GpuBench(target, cache, modes, plan.batches, source_text(folders[0], max(plan.contexts)))
    cost, limits = plan.target_cost, CellLimits(plan.num_warm_steps, plan.num_steps, plan.cell_s)

    def measure(mode: DecodeMode) -> None:
        deadline_s = time.monotonic() + plan.section_s
        with drafting(mode, target, draft, num_blocks, max(plan.batches)) as proposer:
            for cell in _cells(plan, mode):
                name = f"batch {cell.batch}, context {cell.context}"
                if not bench.has_room(cell, limits):
                    results.add(Missing(mode.name, name, "its KV does not fit on this device"))
                elif time.monotonic() > deadline_s:
                    results.add(Missing(mode.name, name, "the section's time was up"))
                else:
                    results.add(bench.measure(cell, proposer, limits, cost, speed))

    for mode in modes:
        results.attempt(mode.name, "the rest", partial(measure, mode))


def _cells(plan: Plan, mode: DecodeMode) -> Iterator[Cell]:
    return (Cell(mode, batch, context) for context in plan.contexts for batch in plan.batches)


def _num_blocks(plan: Plan) -> int:
    """Blocks that the pools of both models can have."""
    wanted = max(plan.batches) * (max(plan.contexts) + 1024) + max(plan.contexts)
    if plan.device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info()[0]
        wanted = min(wanted, most_tokens(free_bytes, plan.target_cost, plan.draft_cost, OTHER_BYTES))
    return wanted // BLOCK_SIZE + 1
