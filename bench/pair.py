"""The table of the README: Transformers against Outrider, plain and with the draft, interleaved in one run.

    python -m bench.pair --streams 1 8 --tokens 64 --rounds 3

All contenders run the padded fixture (`models.fixtures.padded_fixture`: the demo target's logits at the cost of a 0.5 B
model) in bfloat16 on the same prompts. They decode greedily under the repetition penalty that the demo target advises:
without it the texts are loops, which any draft foresees. Rounds are interleaved, so that a slow phase of the machine
affects all contenders. The table has medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from collections.abc import Sequence as Seq
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.contenders.contender import Contender, ContenderRun, Prompts, equal_share
from bench.contenders.http_contender import HttpContender
from bench.contenders.prompts import held_out_prompts
from bench.contenders.transformers_contender import TransformersContender, load
from bench.padded_pair import CACHE, PAIRS, padded_target
from bench.served.application import CACHE_BYTES, MODEL_ID, ServedPairSettings, served_on
from engine.config import CacheConfig, EngineConfig, ModelConfig, ModelDtype, SchedulerConfig, SpeculationConfig
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.proposer.draft_model.model_proposer import ModelProposer
from models.training.architecture import REPETITION_PENALTY
from protos.messages import GenerateRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Row:
    """One contender at one number of streams.

    `ratio` is the median of the rounds' ratios to the first contender. `equal_share` is the share of tokens equal to
    the first contender's: bfloat16 rounds differently for different numbers of rows.
    """

    name: str
    num_streams: int
    tokens_per_second: float
    lowest: float
    highest: float
    ratio: float
    tokens_per_pass: float | None
    equal_share: float

    def __str__(self) -> str:
        per_pass = f"{self.tokens_per_pass:.2f}" if self.tokens_per_pass else "-"
        return (
            f"{self.name:26} {self.num_streams:7d} {self.tokens_per_second:7.1f} ({self.lowest:5.1f}-"
            f"{self.highest:5.1f}) {self.ratio:10.2f} {per_pass:>13} {self.equal_share:13.0%}"
        )


class EngineContender:
    """Outrider's engine in this process, without Ray: the ceiling of what serving can reach."""

    def __init__(self, name: str, engine: EngineCore, repetition_penalty: float = 1.0) -> None:
        self.name = name
        self._engine = engine
        self._repetition_penalty = repetition_penalty
        self._num_runs = 0

    def run(self, prompts: Prompts, num_tokens: int) -> ContenderRun:
        self._num_runs += 1
        sampling = SamplingParams(
            temperature=0.0, repetition_penalty=self._repetition_penalty, seed=0, max_tokens=num_tokens
        )
        salt = f"{self.name} {self._num_runs}"  # no run finds the cached prefixes of another
        outputs: list[list[int]] = [[] for _ in prompts]
        num_passes = 0
        began_s = time.perf_counter()
        for index, prompt in enumerate(prompts):
            self._engine.add(GenerateRequest(str(index), tuple(prompt), sampling, cache_salt=salt))
        while self._engine.has_work:
            for chunk in self._engine.step():
                outputs[int(chunk.request_id)].extend(chunk.token_ids)
                num_passes += 1
        seconds = time.perf_counter() - began_s
        return ContenderRun(outputs, seconds, sum(map(len, outputs)) / num_passes)

    def close(self) -> None:
        self._engine.close()


def main() -> None:
    """Race the contenders and print their table."""
    args = _parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(args.threads)
    target = args.fixture or padded_target(name=args.padded)
    args.draft = args.draft or PAIRS[args.padded].draft
    prompts = held_out_prompts(target, max(args.streams))
    with ExitStack() as stack:
        rows = race(_contenders(args, target, stack), prompts, args.streams, args.tokens, args.rounds)
    print(f"{'':26} streams   tok/s (min-max)        ratio   tokens/pass   same tokens")
    print("\n".join(map(str, rows)))
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="prompts at once")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate for each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of every contender")
    parser.add_argument("--num-draft-tokens", type=int, default=4, help="K")
    parser.add_argument("--repetition-penalty", type=float, default=REPETITION_PENALTY, help="of all requests")
    parser.add_argument("--fixture", type=Path, help="folder of the target; built under .cache/bench if absent")
    parser.add_argument("--padded", choices=list(PAIRS), default="demo", help="the fixture to build, and its draft")
    parser.add_argument("--draft", type=Path, help="folder of the draft; by default the one for --padded")
    parser.add_argument("--skip-http", action="store_true", help="leave out the served application")
    parser.add_argument("--skip-transformers", action="store_true", help="leave out Transformers")
    parser.add_argument("--json", type=Path, help="write the rows here too")
    return parser.parse_args()


def _contenders(args: argparse.Namespace, target: Path, stack: ExitStack) -> list[Contender]:
    contenders: list[Contender] = []
    penalty = args.repetition_penalty
    if not args.skip_transformers:
        stock_target, stock_draft = load(target), load(args.draft)
        contenders.append(TransformersContender(stock_target, repetition_penalty=penalty))
        contenders.append(TransformersContender(stock_target, stock_draft, args.num_draft_tokens, penalty))
    contenders.append(_engine("outrider engine, plain", args, target, with_draft=False))
    contenders.append(_engine("outrider engine, draft", args, target, with_draft=True))
    if not args.skip_http:
        served = ServedPairSettings(
            target, args.draft, num_threads=args.threads, num_draft_tokens=args.num_draft_tokens
        )
        base_url = served_on(CACHE, served, stack)
        contenders.append(HttpContender(base_url, MODEL_ID, {"enabled": False}, penalty))
        contenders.append(HttpContender(base_url, MODEL_ID, {"enabled": True}, penalty))
    for contender in contenders:
        stack.enter_context(closing(contender))
    return contenders


def _engine(name: str, args: argparse.Namespace, target: Path, *, with_draft: bool) -> EngineContender:
    cache = CacheConfig(memory_bytes=CACHE_BYTES)
    model = ModelConfig(str(target), dtype=ModelDtype.BFLOAT16, num_threads=args.threads)
    speculation = SpeculationConfig(num_tokens=args.num_draft_tokens)
    proposer = None
    if with_draft:
        draft = ModelConfig(str(args.draft), dtype=ModelDtype.BFLOAT16)
        proposer = ModelProposer.from_config(draft, CacheConfig(memory_bytes=CACHE_BYTES // 8), SchedulerConfig())
    engine = load_engine(EngineConfig(model, cache, speculation=speculation), proposer)
    return EngineContender(name, engine, args.repetition_penalty)


def race(
    contenders: Seq[Contender], prompts: Prompts, streams: Seq[int], num_tokens: int, num_rounds: int
) -> list[Row]:
    """Run every contender at every number of streams, `num_rounds` times, after a warm-up that is not counted."""
    runs: dict[tuple[int, str], list[ContenderRun]] = {(n, each.name): [] for n in streams for each in contenders}
    for round_index in range(num_rounds + 1):
        for num_streams in streams:
            for contender in contenders:
                run = contender.run(prompts[:num_streams], num_tokens)
                if round_index > 0:
                    runs[num_streams, contender.name].append(run)
    first = contenders[0].name
    return [_row(name, num_streams, each, runs[num_streams, first]) for (num_streams, name), each in runs.items()]


def _row(name: str, num_streams: int, runs: Seq[ContenderRun], first: Seq[ContenderRun]) -> Row:
    speeds = [run.tokens_per_second for run in runs]
    ratios = [speed / other.tokens_per_second for speed, other in zip(speeds, first, strict=True)]
    return Row(
        name,
        num_streams,
        statistics.median(speeds),
        min(speeds),
        max(speeds),
        statistics.median(ratios),
        runs[0].tokens_per_pass,
        equal_share(runs[0].outputs, first[0].outputs),
    )


if __name__ == "__main__":
    main()
