"""The time between two tokens over HTTP as a ratio to that of the engine alone: the cost of serving, per step.

    python -m bench.served.step_cost --model .cache/models/smollm2-135m-instruct --quantization int4 --streams 1 8

Both decode the same prompts without drafts, in turn, round after round. While the engine decodes in this process, all
processes of the application are stopped, so it has the whole machine.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import psutil

from bench.contenders.contender import Run
from bench.contenders.engine_contender import EngineContender
from bench.contenders.http_contender import HttpContender
from bench.contenders.prompts import held_out_prompts
from bench.padded_pair import CACHE
from bench.served.served_pair import CACHE_BYTES, HTTP_PORT, MODEL_ID, ServedPair, start_served
from engine.config import CacheConfig, EngineConfig, ModelConfig
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine

_WARM_UP_TOKENS = 16


def main() -> None:
    """Decode in turn, and print the medians and their ratios."""
    args = _parse_args()
    pair = ServedPair(
        args.model,
        None,
        args.dtype,
        args.threads,
        quantization=args.quantization,
        max_stall_passes=None,
        kv_dtype=args.kv_dtype,
    )
    prompts = held_out_prompts(args.model, max(args.streams))
    application = start_served(CACHE / "step-cost", pair)
    with closing(application):
        application.wait_until_ready()
        served = HttpContender(f"http://127.0.0.1:{HTTP_PORT}/v1", MODEL_ID, is_speculating=False)
        with closing(EngineContender("engine", _engine(args))) as alone:
            for contender in (served, alone):
                contender.run(prompts, _WARM_UP_TOKENS)
            print(f"{'streams':>7} {'served ms':>10} {'alone ms':>9} {'ratio':>6} {'least':>6} {'most':>6}")
            for num_streams in args.streams:
                rounds = []
                for _ in range(args.rounds):
                    with stopped(application.pid):
                        alone_ms = step_ms(alone.run(prompts[:num_streams], args.tokens))
                    rounds.append((step_ms(served.run(prompts[:num_streams], args.tokens)), alone_ms))
                _print_row(num_streams, rounds)


def step_ms(run: Run) -> float:
    """Mean milliseconds between two tokens of a stream, while all streams of the run decode."""
    streams = [np.array(times) for times in run.arrivals or ()]
    begin, end = max(times[0] for times in streams), min(times[-1] for times in streams)
    gaps = [np.diff(times[(times >= begin) & (times <= end)]) for times in streams]
    return 1000 * float(np.concatenate(gaps).mean())


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a process and all its descendants inside the block."""
    root = psutil.Process(pid)
    processes = [root, *root.children(recursive=True)]
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in reversed(processes):
            process.resume()


def _engine(args: argparse.Namespace) -> EngineCore:
    model = ModelConfig(str(args.model), dtype=args.dtype, num_threads=args.threads, quantization=args.quantization)
    cache = CacheConfig(memory_bytes=CACHE_BYTES, dtype=args.kv_dtype)
    return load_engine(EngineConfig(model=model, cache=cache))


def _print_row(num_streams: int, rounds: list[tuple[float, float]]) -> None:
    served_ms, alone_ms = (statistics.median(times) for times in zip(*rounds, strict=True))
    ratios = [served / alone for served, alone in rounds]
    ratio, least, most = statistics.median(ratios), min(ratios), max(ratios)
    print(f"{num_streams:7} {served_ms:10.2f} {alone_ms:9.2f} {ratio:6.2f} {least:6.2f} {most:6.2f}", flush=True)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantization", default="none", choices=["none", "int8", "int4"])
    parser.add_argument("--kv-dtype", default="auto", choices=["auto", "int8"])
    parser.add_argument("--threads", type=int, default=2, help="of the target, and of the engine alone")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="prompts at once")
    parser.add_argument("--tokens", type=int, default=160, help="tokens of each stream")
    parser.add_argument("--rounds", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    main()
