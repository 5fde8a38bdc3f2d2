"""One stream while other programs compute: its speed and its gaps, against the same engine alone.

    python -m bench.contention --niceness 10 0 --rounds 5

Busy processes are children of this one: Linux compares niceness only within a session. The record is printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from engine.config import CacheConfig, EngineConfig, ModelConfig, Quantization, SchedulerConfig, SpeculationConfig
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from models.published import smollm2
from protos.linux import keep_cores
from protos.messages import GenerateRequest, SamplingParams

_BUSY = "while True: pass"
_PROMPT = list(range(100, 164))


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens per second, and the gaps between them in milliseconds."""

    tokens_per_second: float
    gap_p50: float
    gap_p99: float


@dataclass(frozen=True, slots=True)
class Result:
    """One niceness of the busy processes: medians over the rounds, and the share of the speed alone of each."""

    niceness: int
    share: float
    shares: list[float]
    gap_ratio: float  # p99 over p50
    gap_p50: float
    gap_p99: float


@contextmanager
def busy_processes(number: int, niceness: int) -> Iterator[None]:
    """Let processes compute for nothing."""
    command = [sys.executable, "-c", f"import os\nos.nice({niceness})\n{_BUSY}"]
    processes = [subprocess.Popen(command) for _ in range(number)]
    try:
        time.sleep(0.3)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def run_once(engine: EngineCore, name: str, num_tokens: int) -> Run:
    """Generate one stream of greedy tokens, and time all but the first."""
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    engine.add(GenerateRequest(name, tuple(_PROMPT), sampling, cache_salt=name))
    times: list[float] = []
    while len(times) < num_tokens:
        times.extend([time.perf_counter()] * sum(len(chunk.token_ids) for chunk in engine.step()))
    gaps = np.diff(times)
    p50, p99 = 1e3 * np.percentile(gaps, [50, 99])
    return Run(len(gaps) / float(gaps.sum()), float(p50), float(p99))


def measure(engine: EngineCore, levels: Sequence[int], num_busy: int, num_rounds: int, num_tokens: int) -> list[Result]:
    """Run alone and with each kind of busy processes, in turn; a round's share is of its own run alone."""
    shares: dict[int, list[float]] = {level: [] for level in levels}
    runs: dict[int, list[Run]] = {level: [] for level in levels}
    for number in range(num_rounds):
        alone = run_once(engine, f"alone-{number}", num_tokens)
        print(f"alone: {alone}", file=sys.stderr, flush=True)
        for level in levels:
            with busy_processes(num_busy, level):
                run = run_once(engine, f"{level}-{number}", num_tokens)
            print(f"niceness {level}: {run}", file=sys.stderr, flush=True)
            shares[level].append(run.tokens_per_second / alone.tokens_per_second)
            runs[level].append(run)
    return [
        Result(
            level,
            statistics.median(shares[level]),
            shares[level],
            statistics.median(run.gap_p99 / run.gap_p50 for run in runs[level]),
            statistics.median(run.gap_p50 for run in runs[level]),
            statistics.median(run.gap_p99 for run in runs[level]),
        )
        for level in levels
    ]


def main() -> None:
    """Measure and print the record."""
    args = _parse_args()
    keep_cores()  # as the target's thread does
    model = ModelConfig(str(args.target or smollm2.fetch()), quantization=args.quantization, num_threads=args.threads)
    cache, plain = CacheConfig(num_blocks=256, memory_bytes=None), SpeculationConfig(0)
    engine = load_engine(EngineConfig(model, cache, SchedulerConfig(max_model_len=2048), plain))
    run_once(engine, "warm-up", 32)
    results = measure(engine, args.niceness, args.busy, args.rounds, args.tokens)
    record = {
        "command": " ".join(["python -m bench.contention", *sys.argv[1:]]),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "versions": {"torch": torch.__version__},
        "results": [asdict(each) for each in results],
    }
    print(json.dumps(record, indent=1))


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, help="folder of the model; SmolLM2 if absent")
    parser.add_argument("--quantization", type=Quantization, default=Quantization.INT4, choices=list(Quantization))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--busy", type=int, default=2, help="processes that compute for nothing")
    parser.add_argument("--niceness", type=int, nargs="+", default=[10, 0], help="of the busy processes")
    parser.add_argument("--rounds", type=int, default=5, help="each alone and with every niceness in turn")
    parser.add_argument("--tokens", type=int, default=200)
    return parser.parse_args()


if __name__ == "__main__":
    main()
