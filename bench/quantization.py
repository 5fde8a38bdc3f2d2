"""What int8 and int4 weights cost and bring: speed, memory, held-out loss, and the draft's acceptance.

    python -m bench.quantization --streams 1 8 --rounds 3

Speed is measured on the padded fixture (`models.padded_fixture`), all kinds interleaved in one run; loss and acceptance
on the demo pair along files that it was not trained on; memory in a process of its own for each kind.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.engine_contender import EngineContender
from bench.pair import CACHE_BYTES, DEMO, padded_target
from bench.prompts import held_out_prompts
from bench.race import race
from bench.table import print_rows, rows_of
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.engine_core import EngineCore
from engine.model_runner import ModelRunner
from engine.proposer.model import ModelProposer
from engine.quantized_linear import Quantization
from engine.span import Span

NUM_WINDOWS = 18
WINDOW_TOKENS = 384
NUM_ACCEPTANCE_PROMPTS = 12
ACCEPTANCE_TOKENS = 96
_MEMORY_PROBE = """
import sys, psutil
from engine.config import CacheConfig, ModelConfig
from engine.model_runner import ModelRunner
before = psutil.Process().memory_info().rss
ModelRunner(ModelConfig(sys.argv[1], "bfloat16", quantization=sys.argv[2]), CacheConfig(num_blocks=64))
print(psutil.Process().memory_info().rss - before)
"""


def main() -> None:
    args = _parse_args()
    torch.set_num_threads(args.threads)
    target = padded_target()
    prompts = held_out_prompts(DEMO / "target", max(max(args.streams), NUM_ACCEPTANCE_PROMPTS))
    contenders = [EngineContender(kind, _engine(target, kind, args.threads)) for kind in Quantization]
    print_rows(rows_of(race(contenders, prompts, args.streams, args.tokens, args.rounds)))
    print(f"\n{'':8} resident MB   held-out loss   perplexity   tokens per pass at T=0, K=4")
    for kind in Quantization:
        loss = held_out_loss(kind)
        print(
            f"{kind:8} {resident_mb(target, kind):11.0f} {loss:15.4f} {math.exp(loss):12.3f} "
            f"{tokens_per_pass(kind, prompts):30.2f}",
            flush=True,
        )


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def _engine(target: Path, kind: Quantization, num_threads: int) -> EngineCore:
    model = ModelConfig(str(target), "bfloat16", quantization=kind, num_threads=num_threads)
    return EngineCore.from_config(EngineConfig(model, CacheConfig(memory_bytes=CACHE_BYTES)))


def held_out_loss(kind: Quantization) -> float:
    """Mean loss in nats per token of the demo target along held-out files, windows of `WINDOW_TOKENS`."""
    runner = ModelRunner(ModelConfig(str(DEMO / "target"), "bfloat16", quantization=kind), CacheConfig(num_blocks=64))
    windows = held_out_prompts(DEMO / "target", NUM_WINDOWS, WINDOW_TOKENS)
    blocks = list(range(WINDOW_TOKENS // runner.block_size))
    total = 0.0
    for window in windows:
        logits = runner.forward([Span(window[:-1], 0, blocks, WINDOW_TOKENS - 1)])
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(window[1:])))
    return total / len(windows)


def tokens_per_pass(kind: Quantization, prompts: Sequence[list[int]]) -> float:
    """Of the demo pair, greedy, the draft in full precision and the target as `kind`."""
    target = ModelConfig(str(DEMO / "target"), "bfloat16", quantization=kind)
    draft = ModelConfig(str(DEMO / "draft"), "bfloat16")
    proposer = ModelProposer.from_config(draft, CacheConfig(num_blocks=512), SchedulerConfig())
    cache = CacheConfig(num_blocks=512)
    core = EngineCore.from_config(EngineConfig(target, cache, speculation=SpeculationConfig(4)), proposer)
    run = EngineContender(kind, core).run(list(prompts)[:NUM_ACCEPTANCE_PROMPTS], ACCEPTANCE_TOKENS)
    assert run.tokens_per_pass is not None, "an engine counts its passes"
    return run.tokens_per_pass


def resident_mb(target: Path, kind: Quantization) -> float:
    """What loading the model added to the memory of a fresh process."""
    command = [sys.executable, "-c", _MEMORY_PROBE, str(target), kind]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1e6


if __name__ == "__main__":
    main()
