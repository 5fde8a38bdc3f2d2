"""The cost of `deterministic: true`: every kind of step of the padded fixture, with and without it, interleaved.

python -m bench.steps.deterministic --threads 2 --repeats 5
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from bench.padded_pair import padded_target
from engine.batch.span import Span
from engine.config import CacheConfig, ModelConfig, ModelDtype
from engine.model.runner.model_runner import ModelRunner

SHAPES = ((1, 1, 1024), (1, 5, 1024), (8, 1, 1024), (8, 5, 1024), (16, 1, 1024), (1, 512, 0), (1, 512, 7500))
NUM_BLOCKS = 16 * 66


def main() -> None:
    """Time every shape of step with and without determinism and print both."""
    args = _parse_args()
    torch.set_num_threads(args.threads)
    runners = [_runner(args.threads, deterministic=deterministic) for deterministic in (False, True)]
    print(f"{'streams':>8} {'rows':>6} {'context':>8} {'plain ms':>10} {'deterministic ms':>18} {'ratio':>7}")
    for streams, rows, context in SHAPES:
        spans = _spans(streams, rows, context, runners[0].block_size)
        plain_ms, deterministic_ms = _medians_ms(runners, spans, args.repeats)
        print(
            f"{streams:8} {rows:6} {context:8} {plain_ms:10.1f} {deterministic_ms:18.1f} "
            f"{deterministic_ms / plain_ms:7.2f}",
            flush=True,
        )


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    return parser.parse_args()


def _runner(num_threads: int, *, deterministic: bool) -> ModelRunner:
    model = ModelConfig(str(padded_target()), ModelDtype.BFLOAT16, num_threads=num_threads, deterministic=deterministic)
    return ModelRunner(model, CacheConfig(num_blocks=NUM_BLOCKS))


def _spans(streams: int, rows: int, context: int, block_size: int) -> list[Span]:
    """Sequences with so many rows behind so much context, each with blocks of its own."""
    num_blocks = -(-(context + rows) // block_size)
    tables = [range(stream * num_blocks, (stream + 1) * num_blocks) for stream in range(streams)]
    tokens = [1 + (7 * row) % 1000 for row in range(rows)]
    return [Span(tokens, context, list(table), min(rows, 16)) for table in tables]


def _medians_ms(runners: list[ModelRunner], spans: list[Span], repeats: int) -> list[float]:
    times: list[list[float]] = [[] for _ in runners]
    for repeat in range(repeats + 1):
        for runner, seconds in zip(runners, times, strict=True):
            began_s = time.perf_counter()
            runner.forward(spans)
            if repeat:  # the first one is a warm-up
                seconds.append(time.perf_counter() - began_s)
    return [1e3 * statistics.median(seconds) for seconds in times]


if __name__ == "__main__":
    main()
