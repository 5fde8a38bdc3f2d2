"""The plan of one run of the GPU bench: models, device, sections and limits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bench.gpu.floor import ModelCost
from bench.wide_fixture import WideShape
from engine.config import KVDtype
from engine.kv_cache.pool import head_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """Seconds are limits: of one line, of a section, and of the whole run."""

    device: torch.device
    dtype: torch.dtype
    kv_kind: KVDtype  # of the target's pool
    target: WideShape
    draft: WideShape
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    sections: tuple[str, ...]
    num_warm_steps: int
    num_steps: int
    cell_s: float
    section_s: float
    total_s: float

    @property
    def target_cost(self) -> ModelCost:
        return ModelCost(self.target, self.dtype.itemsize, head_bytes(self.kv_kind, 1, self.dtype))

    @property
    def draft_cost(self) -> ModelCost:
        return ModelCost(self.draft, self.dtype.itemsize, self.dtype.itemsize)
