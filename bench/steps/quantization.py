"""The effect of int8 and int4 weights and of an int8 KV pool: speed, memory, held-out loss, the draft's acceptance.

    python -m bench.steps.quantization --streams 1 8 --rounds 3

Speed is measured on the padded fixture (`models.fixtures.padded_fixture`), all kinds interleaved in one run; loss and
acceptance on the demo pair along files that it was not trained on; memory in a process of its own for each kind.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.contenders.engine_contender import EngineContender
from bench.contenders.prompts import held_out_prompts
from bench.contenders.race import race
from bench.contenders.table import print_rows, rows_of
from bench.padded_pair import DEMO, padded_target
from bench.served.served_pair import CACHE_BYTES
from engine.batch.span import Span
from engine.config import (
    CacheConfig,
    EngineConfig,
    KVDtype,
    ModelConfig,
    ModelDtype,
    Quantization,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.model.runner.model_runner import ModelRunner
from engine.proposer.draft_model.model_proposer import ModelProposer

NUM_WINDOWS = 18
WINDOW_TOKENS = 384
NUM_ACCEPTANCE_PROMPTS = 12
ACCEPTANCE_TOKENS = 96
KV_TOKENS = 8192  # of the pool whose memory is quoted
_MEMORY_PROBE = """
import sys, psutil
from engine.config import CacheConfig, ModelConfig
from engine.model.runner.model_runner import ModelRunner
before = psutil.Process().memory_info().rss
model = ModelConfig(sys.argv[1], "bfloat16", quantization=sys.argv[2])
runner = ModelRunner(model, CacheConfig(num_blocks=int(sys.argv[4]) // 16, dtype=sys.argv[3]))
runner.import_blocks(list(range(runner.num_blocks)), runner.export_blocks([0]).expand(runner.num_blocks, -1) + 1)
print(psutil.Process().memory_info().rss - before)
"""


@dataclass(frozen=True, slots=True)
class Variant:
    """The parts that are kept in fewer bits."""

    weights: Quantization
    cache: KVDtype = KVDtype.AUTO

    @property
    def name(self) -> str:
        return str(self.weights) if self.cache is KVDtype.AUTO else f"{self.cache} KV"


VARIANTS = (*(Variant(kind) for kind in Quantization), Variant(Quantization.NONE, KVDtype.INT8))


def main() -> None:
    """Measure every variant and print its speed, memory, loss and acceptance."""
    args = _parse_args()
    torch.set_num_threads(args.threads)
    target = padded_target()
    prompts = held_out_prompts(DEMO / "target", max(max(args.streams), NUM_ACCEPTANCE_PROMPTS))
    contenders = [EngineContender(each.name, _engine(target, each, args.threads)) for each in VARIANTS]
    print_rows(rows_of(race(contenders, prompts, args.streams, args.tokens, args.rounds)))
    print(f"\n{'':8} resident MB   held-out loss   perplexity   tokens per pass at T=0, K=4")
    for variant in VARIANTS:
        loss = held_out_loss(variant)
        print(
            f"{variant.name:8} {resident_mb(target, variant):11.0f} {loss:15.4f} {math.exp(loss):12.3f} "
            f"{tokens_per_pass(variant, prompts):30.2f}",
            flush=True,
        )


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def _engine(target: Path, variant: Variant, num_threads: int) -> EngineCore:
    model = ModelConfig(str(target), ModelDtype.BFLOAT16, quantization=variant.weights, num_threads=num_threads)
    return load_engine(EngineConfig(model, CacheConfig(memory_bytes=CACHE_BYTES, dtype=variant.cache)))


def held_out_loss(variant: Variant) -> float:
    """Mean loss in nats per token of the demo target along held-out files, windows of `WINDOW_TOKENS`."""
    model = ModelConfig(str(DEMO / "target"), ModelDtype.BFLOAT16, quantization=variant.weights)
    runner = ModelRunner(model, CacheConfig(num_blocks=64, dtype=variant.cache))
    windows = held_out_prompts(DEMO / "target", NUM_WINDOWS, WINDOW_TOKENS)
    blocks = list(range(WINDOW_TOKENS // runner.block_size))
    total = 0.0
    for window in windows:
        logits = runner.forward([Span(window[:-1], 0, blocks, WINDOW_TOKENS - 1)])
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:])))
    return total / len(windows)


def tokens_per_pass(variant: Variant, prompts: Sequence[list[int]]) -> float:
    """Measure the demo pair, greedy, the draft in full precision and the target as `variant`."""
    target = ModelConfig(str(DEMO / "target"), ModelDtype.BFLOAT16, quantization=variant.weights)
    draft = ModelConfig(str(DEMO / "draft"), ModelDtype.BFLOAT16)
    proposer = ModelProposer.from_config(draft, CacheConfig(num_blocks=512), SchedulerConfig())
    cache = CacheConfig(num_blocks=512, dtype=variant.cache)
    core = load_engine(EngineConfig(target, cache, speculation=SpeculationConfig(4)), proposer)
    run = EngineContender(variant.name, core).run(list(prompts)[:NUM_ACCEPTANCE_PROMPTS], ACCEPTANCE_TOKENS)
    assert run.tokens_per_pass is not None, "an engine counts its passes"
    return run.tokens_per_pass


def resident_mb(target: Path, variant: Variant) -> float:
    """Return the memory that the model and a pool of `KV_TOKENS`, all of them written, added to a fresh process."""
    command = [sys.executable, "-c", _MEMORY_PROBE, str(target), variant.weights, variant.cache, str(KV_TOKENS)]
    return float(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1e6)


if __name__ == "__main__":
    main()
