"""Every way to speculate against plain decoding, interleaved: `make bench-speculation`.

    python -m bench.speculation --questions spec_bench_question.jsonl --json OUT

All methods share one target, the padded fixture (the demo target's logits at the cost of a 0.5 B model), and its prefix
cache, so the clock measures decoding; a head has a target of its own. A round runs the methods one after the other on
the same prompts and seeds; ratios are taken within a round. Texts are sampled under the repetition penalty that the
demo target advises: without it they are loops, which any draft foresees.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.padded_pair import DEMO, padded_target
from bench.speculation.methods import MAKERS, PLAIN, Method, Suite
from bench.speculation.workload import Prompts, RunFigures, demo_text, measure, questions
from engine.config import CacheConfig
from models.training.architecture import REPETITION_PENALTY
from protos.messages import SamplingParams

CACHE_BYTES = 1 << 29
MAX_QUESTION_TOKENS = 256


@dataclass(frozen=True, slots=True)
class MethodRow:
    """One method at one load: medians over the rounds; `speedup` is against plain decoding of the same round."""

    workload: str
    temperature: float
    num_streams: int
    method: str
    tokens_per_pass: float
    tokens_per_second: float
    speedup: float
    accepted_by_position: tuple[float, ...]


def main() -> None:
    """Run every method on every workload and print the rows."""
    args = _parse_args()
    logging.basicConfig(level=logging.WARNING)
    rows: list[MethodRow] = []
    with ExitStack() as stack:
        target = args.target or padded_target()
        suite = Suite(target, DEMO, args.dtype, CacheConfig(memory_bytes=CACHE_BYTES), stack)
        methods = suite.methods(args.methods)
        for workload, prompts, temperature in _cases(args):
            for row in _race(methods, workload, prompts, temperature, args):
                _print_row(row, is_first=row.method == PLAIN)
                rows.append(row)
            if args.json is not None:  # after every case, for a run that is interrupted
                args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, help="Spec-Bench or MT-bench questions, jsonl")
    parser.add_argument("--skip-demo", action="store_true", help="only the given texts")
    parser.add_argument("--methods", nargs="+", choices=list(MAKERS), default=list(MAKERS))
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8], help="sequences at once")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument(
        "--repetition-penalty", type=float, default=REPETITION_PENALTY, help="of all texts; 1 makes them loop"
    )
    parser.add_argument("--tokens", type=int, default=48, help="tokens to generate for each prompt")
    parser.add_argument("--rounds", type=int, default=1, help="interleaved repetitions after one that is not counted")
    parser.add_argument("--target", type=Path, help="folder of the target; the padded fixture if absent")
    parser.add_argument("--dtype", default="bfloat16", help="of the target")
    parser.add_argument("--json", type=Path, help="write the rows here")
    return parser.parse_args()


def _cases(args: argparse.Namespace) -> Iterator[tuple[str, Prompts, float]]:
    """Yield texts and temperatures. Each number of streams takes the first of the prompts."""
    model, num_streams = DEMO / "target", max(args.streams)
    texts = {} if args.skip_demo else {"demo text": demo_text(model, num_streams)}
    if args.questions is not None:
        texts["questions"] = questions(model, args.questions, num_streams, MAX_QUESTION_TOKENS)
    for name, prompts in texts.items():
        for temperature in args.temperatures:
            yield name, prompts, temperature


def _race(
    methods: Seq[Method], workload: str, prompts: Prompts, temperature: float, args: argparse.Namespace
) -> Iterator[MethodRow]:
    sampling = SamplingParams(
        temperature=temperature, repetition_penalty=args.repetition_penalty, max_tokens=args.tokens
    )
    for num_streams in args.streams:
        part = prompts[:num_streams]
        runs: dict[str, list[RunFigures]] = {method.name: [] for method in methods}
        for method in methods:  # prefills the prompts, and warms every kind of pass
            measure(method.engine(), part, replace(sampling, max_tokens=4), method.before_step)
        for _ in range(args.rounds):
            for method in methods:
                runs[method.name].append(measure(method.engine(), part, sampling, method.before_step))
        for name, measured in runs.items():
            yield _row(workload, temperature, num_streams, name, measured, runs[PLAIN])


def _row(
    workload: str, temperature: float, num_streams: int, method: str, runs: Seq[RunFigures], plain: Seq[RunFigures]
) -> MethodRow:
    ratios = [run.tokens_per_second / base.tokens_per_second for run, base in zip(runs, plain, strict=True)]
    return MethodRow(
        workload,
        temperature,
        num_streams,
        method,
        statistics.median(run.tokens_per_pass for run in runs),
        statistics.median(run.tokens_per_second for run in runs),
        statistics.median(ratios),
        tuple(round(share, 3) for share in runs[-1].accepted_by_position),
    )


def _print_row(row: MethodRow, *, is_first: bool) -> None:
    if is_first:
        print(f"\n{row.workload}, T = {row.temperature}, {row.num_streams} streams")
        print(f"{'':18}{'tok/s':>8}{'speed-up':>10}{'tokens/pass':>13}   accepted at position 1, 2, ...")
    accepted = " ".join(f"{share:.2f}" for share in row.accepted_by_position)
    print(
        f"{row.method:18}{row.tokens_per_second:8.1f}{row.speedup:10.2f}{row.tokens_per_pass:13.2f}   {accepted}",
        flush=True,
    )


if __name__ == "__main__":
    main()
