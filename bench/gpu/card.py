"""The card that is looked at: its model, its engine, timings, and the lines that were found so far."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor

from bench.wide_fixture import WideShape, build_wide_fixture
from engine.config import (
    CacheConfig,
    EngineConfig,
    GraphConfig,
    GraphKind,
    ModelConfig,
    ModelDtype,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.model.cuda_graphs.recorder import ForwardOutput, graph_recorder
from engine.proposer.text_match.text_matcher import NgramProposer
from protos.messages import SamplingParams

T = TypeVar("T")

DEMO = Path(__file__).parents[2] / "models" / "demo"
SMOKE_SHAPE = WideShape(288, 13, 800, 8, 2, 64, 4160)
K = 4
NUM_SEQUENCES = 8
PROMPT = tuple(range(100, 164))
REPEATS = 7
CALLS = 8  # timed at once
CACHE_BYTES = 200 << 20  # several times a device's cache
MODES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=100),
    "T 0.7": SamplingParams(temperature=0.7, max_tokens=100, seed=1),
    "T 0.7, top_p 0.9": SamplingParams(temperature=0.7, top_p=0.9, max_tokens=100, seed=1),
}
DRAFTED = (False, True)


class Look:
    """The model that is looked at, the device, and the lines that were found so far."""

    def __init__(self, device: torch.device, shape: WideShape, work: Path, out: Path, *, is_smoke: bool) -> None:
        """`work` is the folder of the built model, `out` the file of the results."""
        self.device = device
        self.shape = shape
        self.is_smoke = is_smoke
        self.row_counts = (1, 5, 40) if is_smoke else (1, 5, 640)
        self._work = work
        self._file = out
        self._lines: list[dict[str, object]] = []

    @property
    def has_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.has_gpu else torch.float32

    @cached_property
    def folder(self) -> Path:
        """The model, built on the first use."""
        folder = self._work / f"look-{self.shape.hidden_size}-{self.shape.num_layers}"
        if not (folder / "tokenizer.json").exists():
            build_wide_fixture(DEMO / "target", folder, self.shape, self.device, self.dtype)
        return folder

    @cached_property
    def engine(self) -> EngineCore:
        """The engine of all parts but `deterministic`: the model is loaded and recorded once."""
        return self.load_engine(is_deterministic=False)

    def load_engine(self, *, is_deterministic: bool) -> EngineCore:
        """Load an engine whose drafts come from n-grams: no second model, no second process."""
        kind = GraphKind.AUTO if self.has_gpu else GraphKind.EAGER  # a processor records nothing, but pads
        batches = (1, NUM_SEQUENCES) if self.is_smoke else (1, 2, 4, 8, 16, 32, 64, 128)
        dtype = ModelDtype(str(self.dtype).removeprefix("torch."))
        graphs = GraphConfig(kind, batches=batches)
        model = ModelConfig(str(self.folder), dtype, self.device.type, graphs=graphs, deterministic=is_deterministic)
        limits = SchedulerConfig(max_num_sequences=max(batches))
        cache = CacheConfig(num_blocks=1024)
        config = EngineConfig(model, cache, scheduler=limits, speculation=SpeculationConfig(K))
        return load_engine(config, NgramProposer(min_size=1))

    def add(self, part: str, **figures: object) -> None:
        """Print a line and save it with those before."""
        print(f"{part:13s} " + "  ".join(f"{name} {value}" for name, value in figures.items()), flush=True)
        self._lines.append({"part": part, **figures})
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text(json.dumps(self._lines, indent=1) + "\n", encoding="utf-8")

    def seconds(self, call: Callable[[], object]) -> float:
        """The median time of a call among calls one after the other, the host's and the device's work included."""
        call()
        times = []
        for _ in range(2 if self.is_smoke else REPEATS):
            self.wait()
            began_s = time.perf_counter()
            for _ in range(CALLS):
                call()
            self.wait()
            times.append((time.perf_counter() - began_s) / CALLS)
        return median(times)

    def device_seconds(self, *calls: Callable[[], Tensor]) -> float:
        """The median time of a call, without the host's: the calls are recorded and replayed.

        Several calls with their own weights do not find them in the device's cache.
        """
        if not self.has_gpu:
            return self.seconds(calls[0])
        calls = calls * -(-CALLS // len(calls))

        def compute() -> ForwardOutput:
            return ForwardOutput([call() for call in calls][-1])

        return self.seconds(graph_recorder()(compute)) / len(calls)

    def wait(self) -> None:
        if self.has_gpu:
            torch.cuda.synchronize()
