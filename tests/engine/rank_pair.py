"""Two processes that compute several small models together, one model after another.

`engine.rank_team` starts processes for each model; here one serves for all of them: its start is what takes long.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from engine.config import CacheConfig, ModelConfig
from engine.model_runner import ModelRunner
from engine.rank import ALONE, Rank
from engine.span import Span
from protos.errors import ConfigError

_TIMEOUT = timedelta(seconds=120)
_CACHE = CacheConfig(block_size=4, memory_bytes=1 << 18)
_TABLES = ([5, 2, 7, 11, 3, 17, 8, 1], [4, 9, 13, 6, 0, 12, 10, 14])
_PROMPTS = (tuple(range(3, 14)), (50, 7, 7, 31, 20, 9, 4))
_NUM_TOKENS = 20


@dataclass(frozen=True, slots=True)
class Computed:
    """What one model gave: greedy texts, the logits of a pass of many kinds of rows, and two of its blocks."""

    texts: list[list[int]]
    logits: Tensor
    blocks: Tensor
    read_back: Tensor  # the blocks again, after they went in elsewhere
    num_blocks: int  # that the pool's memory, of all ranks together, has room for


def compute_divided(folders: Mapping[str, Path], meeting: Path) -> dict[str, Computed | str]:
    """What each model gives on two ranks, or why it cannot be divided; `meeting` is a folder of their own."""
    paths = list(folders.values())
    other = multiprocessing.get_context("spawn").Process(target=_compute_all, args=(1, paths, meeting))
    other.start()
    try:
        return dict(zip(folders, _compute_all(0, paths, meeting), strict=True))
    finally:
        other.join(60)
        other.kill()


def compute_alone(folder: Path) -> Computed:
    """The same on one device."""
    return _compute(folder, ALONE)


def _compute_all(index: int, folders: Seq[Path], meeting: Path) -> list[Computed | str]:
    store = dist.FileStore(str(meeting / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=index, world_size=2, timeout=_TIMEOUT)
    try:
        rank = Rank(index, 2, torch.device("cpu"))
        return [_compute_or_refuse(folder, rank) for folder in folders]
    finally:
        dist.destroy_process_group()


def _compute_or_refuse(folder: Path, rank: Rank) -> Computed | str:
    try:
        return _compute(folder, rank)
    except ConfigError as error:
        return str(error)


def _compute(folder: Path, rank: Rank) -> Computed:
    runner = ModelRunner(ModelConfig(str(folder), dtype="float32", device="cpu", num_threads=1), _CACHE, rank=rank)
    texts = _greedy(runner)
    verified = [Span(text[:12], 0, table, 9) for text, table in zip(texts, _TABLES, strict=True)]
    logits = runner.forward(verified)
    blocks = runner.export_blocks([5, 2])
    to_be_filled = torch.empty(2, runner.bytes_per_block, dtype=torch.uint8)
    runner.import_blocks([21, 22], blocks if rank.index == 0 else to_be_filled)
    return Computed(texts, logits, blocks, runner.export_blocks([21, 22]), runner.num_blocks)


def _greedy(runner: ModelRunner) -> list[list[int]]:
    """Two prompts in one pass, then decodes of both at once, far beyond the windows of families that have one."""
    texts = [list(prompt) for prompt in _PROMPTS]
    starts = [0, 0]
    for _ in range(_NUM_TOKENS):
        spans = [Span(text[start:], start, table, 1) for text, start, table in zip(texts, starts, _TABLES, strict=True)]
        starts = [len(text) for text in texts]
        for text, token_id in zip(texts, runner.forward(spans).argmax(dim=1).tolist(), strict=True):
            text.append(token_id)
    return texts
