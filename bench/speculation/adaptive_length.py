"""Adaptive lengths against fixed ones and none, interleaved, in this process.

    python -m bench.speculation.adaptive_length --padded --streams 1 2 4 8 16 32 64 --tokens 96 --rounds 3
    python -m bench.speculation.adaptive_length --padded --bad-draft --lengths 0 --streams 1 2 4 8 16 32 64

One engine with fixed lengths, that a request asks for, and one with adaptive ones, on the same prompts. The adaptive
one learns in the warm-up round, as a server does before the first quote. Every prompt comes `--waves` times, the next
request as soon as one ends: a load is so many streams at all times, and what is left when no request waits is not
timed. `--padded` builds the padded fixture (0.46 B,
bfloat16) in a temporary folder and serves it; without it the target is the demo pair's, or `--target`. `--bad-draft`
proposes the demo draft's tokens one id off four times in five, for an acceptance of about 0.2. Medians over rounds of
the ratio to plain decoding in the same round; last, by number of streams, the two ratios that the bars are about:
adaptive against the best fixed length (0.95 with the good draft) and against plain decoding (0.98 with the bad one).

`--cpu-time` counts the seconds that this thread has computed instead of those that have passed: with one thread, and
everything in this process, they are the same on a quiet machine, and nearly so on one that is not.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence as Seq
from itertools import groupby
from pathlib import Path

import torch

from bench.contenders.contender import Contender
from bench.contenders.engine_contender import EngineContender
from bench.contenders.prompts import held_out_prompts
from bench.contenders.race import race
from bench.contenders.table import Row, print_rows, rows_of
from bench.padded_pair import DEMO, padded_target
from engine.batch.draft import Draft
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.proposer import Proposer
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.sequence.draft_query import DraftQuery
from engine.sequence.request_tokens import RequestTokens

CACHE_BYTES = 1 << 28
MAX_LENGTH = 16
ADAPTIVE = "adaptive"


class SpoiledProposer:
    """Another proposer's drafts with four tokens of five changed: its cost, and little of its acceptance."""

    def __init__(self, inner: Proposer) -> None:
        self._inner = inner

    def open(self, sequence: RequestTokens) -> None:
        self._inner.open(sequence)

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        return [
            Draft(
                tuple(_spoil(token_id, len(query.sequence.token_ids) + i) for i, token_id in enumerate(draft.token_ids))
            )
            for query, draft in zip(queries, self._inner.propose(queries), strict=True)
        ]

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        self._inner.commit(sequences)

    def close(self, request_id: str) -> None:
        self._inner.close(request_id)


def _spoil(token_id: int, position: int) -> int:
    return token_id if hash((position, 7)) % 5 == 0 else token_id ^ 1


def main() -> None:
    """Race the lengths and print their table."""
    args = _parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(args.threads)
    if args.cpu_time:
        time.perf_counter = time.thread_time  # before any engine is built
    if args.padded:
        args.target, args.dtype = padded_target(), "bfloat16"
    _race(args)


def _race(args: argparse.Namespace) -> None:
    fixed = _engine(args, SpeculationConfig(MAX_LENGTH, max_num_tokens=MAX_LENGTH))
    adaptive = _engine(args, SpeculationConfig(4, max_num_tokens=MAX_LENGTH, adaptive=True))
    contenders: list[Contender] = [
        EngineContender(f"K = {length}", fixed, length, temperatures=args.temperatures, waves=args.waves)
        for length in args.lengths
    ]
    contenders.append(EngineContender(ADAPTIVE, adaptive, temperatures=args.temperatures, waves=args.waves))
    prompts = held_out_prompts(DEMO / "target", max(args.streams))
    rows = rows_of(race(contenders, prompts, args.streams, args.tokens, args.rounds))
    print_rows(rows)
    _print_bars(rows)
    for contender in contenders:
        contender.close()


def _print_bars(rows: Seq[Row]) -> None:
    for num_streams, group in groupby(rows, key=lambda row: row.num_streams):
        members = list(group)
        adaptive = next(row for row in members if row.name == ADAPTIVE)
        best = max((row for row in members if row is not adaptive), key=lambda row: row.ratio)
        print(
            f"{num_streams} streams: adaptive is {adaptive.ratio / best.ratio:.3f} of the best fixed ({best.name}), "
            f"{adaptive.ratio:.3f} of {members[0].name}"
        )


def _engine(args: argparse.Namespace, speculation: SpeculationConfig) -> EngineCore:
    model = ModelConfig(str(args.target), dtype=args.dtype, num_threads=args.threads)
    config = EngineConfig(model, CacheConfig(memory_bytes=CACHE_BYTES), speculation=speculation)
    return load_engine(config, _proposer(args))


def _proposer(args: argparse.Namespace) -> Proposer:
    draft = ModelConfig(str(DEMO / "draft"), dtype=args.dtype)
    proposer = ModelProposer.from_config(draft, CacheConfig(memory_bytes=CACHE_BYTES // 8), SchedulerConfig())
    return SpoiledProposer(proposer) if args.bad_draft else proposer


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=DEMO / "target", help="folder of the target model")
    parser.add_argument("--padded", action="store_true", help="the demo target at a large model's cost")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16], help="prompts at once")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[0, 1, 2, 4, 8], help="fixed K; the first is the base"
    )
    parser.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0], help="of the requests, in turn"
    )
    parser.add_argument("--tokens", type=int, default=96, help="tokens to generate for each prompt")
    parser.add_argument("--waves", type=int, default=3, help="times that each prompt comes")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions after one warm-up round")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--bad-draft", action="store_true", help="spoil the draft's tokens")
    parser.add_argument("--cpu-time", action="store_true", help="count computed seconds, not passed ones; one thread")
    return parser.parse_args()


if __name__ == "__main__":
    main()
