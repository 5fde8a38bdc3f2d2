"""The table of the README: Transformers against Outrider, plain and with the draft, interleaved in one run.

    python -m bench.pair --streams 1 8 --tokens 64 --rounds 3

All contenders run the padded fixture (`models.fixtures.padded_fixture`: the demo target's logits at the cost of a 0.5 B
model) in bfloat16 on the same prompts, greedy under the repetition penalty that the demo target advises: without it the
texts are loops, which any draft foresees. Rounds are interleaved, so that a machine that slows down slows down for
all contenders; the table quotes medians.
"""

from __future__ import annotations

import argparse
import json
import logging
from contextlib import ExitStack, closing
from dataclasses import asdict
from pathlib import Path

import torch

from bench.contenders.contender import Contender
from bench.contenders.engine_contender import EngineContender
from bench.contenders.http_contender import HttpContender
from bench.contenders.prompts import held_out_prompts
from bench.contenders.race import race
from bench.contenders.table import print_rows, print_step_times, rows_of
from bench.contenders.transformers_contender import TransformersContender, load
from bench.padded_pair import CACHE, PAIRS, padded_target
from bench.served.served_pair import CACHE_BYTES, MODEL_ID, ServedPair, served_on
from engine.config import CacheConfig, EngineConfig, ModelConfig, ModelDtype, SchedulerConfig, SpeculationConfig
from engine.engine_core.loading import load_engine
from engine.proposer.draft_model.model_proposer import ModelProposer
from models.training.architecture import REPETITION_PENALTY


def main() -> None:
    """Race the contenders and print their table."""
    args = _parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(args.threads)
    target = args.fixture or padded_target(name=args.padded)
    args.draft = args.draft or PAIRS[args.padded].draft
    prompts = held_out_prompts(target, max(args.streams))
    with ExitStack() as stack:
        contenders = _contenders(args, target, stack)
        runs = race(contenders, prompts, args.streams, args.tokens, args.rounds)
    rows = rows_of(runs)
    print_rows(rows)
    print_step_times(runs)
    if args.json is not None:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8], help="prompts at once")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate for each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions; the table quotes medians")
    parser.add_argument("--threads", type=int, default=2, help="torch threads of every contender")
    parser.add_argument("--num-draft-tokens", type=int, default=4, help="K")
    parser.add_argument(
        "--repetition-penalty", type=float, default=REPETITION_PENALTY, help="of all requests; 1: texts fall into loops"
    )
    parser.add_argument("--fixture", type=Path, help="folder of the target model; built under .cache/bench if absent")
    parser.add_argument("--padded", choices=list(PAIRS), default="demo", help="the fixture to build, and its draft")
    parser.add_argument("--draft", type=Path, help="folder of the draft; that of --padded if absent")
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
        served = ServedPair(target, args.draft, num_threads=args.threads, num_draft_tokens=args.num_draft_tokens)
        base_url = served_on(CACHE, served, stack)
        contenders.append(HttpContender(base_url, MODEL_ID, is_speculating=False, repetition_penalty=penalty))
        contenders.append(HttpContender(base_url, MODEL_ID, is_speculating=True, repetition_penalty=penalty))
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
    return EngineContender(name, engine, repetition_penalty=args.repetition_penalty)


if __name__ == "__main__":
    main()
