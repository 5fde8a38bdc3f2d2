"""Adaptive lengths against fixed ones and none, interleaved, in this process: `python -m bench.adaptive_length`.

    python -m bench.adaptive_length --streams 1 4 16 --lengths 0 1 2 4 8 --tokens 96 --rounds 3

One engine per length on the same prompts, the padded fixture or another target; the adaptive one learns in the warm-up
round, as a server does before the first quote. `--bad-draft` proposes the demo draft's tokens one id off four times in
five, for an acceptance of about 0.2. Medians over rounds of the ratio to plain decoding in the same round.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence as Seq
from pathlib import Path

import torch

from bench.contender import Contender
from bench.engine_contender import EngineContender
from bench.prompts import held_out_prompts
from bench.race import race
from bench.table import print_rows, rows_of
from engine.batch import ScheduledSequence
from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculationConfig
from engine.draft import Draft
from engine.engine_core import EngineCore
from engine.proposer import Proposer
from engine.proposer.model import ModelProposer
from engine.sequence import Sequence

DEMO = Path("models/demo")
CACHE_BYTES = 1 << 28
MAX_LENGTH = 16


class SpoiledProposer:
    """Another proposer's drafts with four tokens of five changed: its cost, and little of its acceptance."""

    def __init__(self, inner: Proposer) -> None:
        self._inner = inner

    def open(self, sequence: Sequence) -> None:
        self._inner.open(sequence)

    def propose(self, shares: Seq[ScheduledSequence]) -> list[Draft]:
        return [
            Draft(
                tuple(_spoil(token_id, len(share.sequence.token_ids) + i) for i, token_id in enumerate(draft.token_ids))
            )
            for share, draft in zip(shares, self._inner.propose(shares), strict=True)
        ]

    def commit(self, sequences: Seq[Sequence]) -> None:
        self._inner.commit(sequences)

    def close(self, request_id: str) -> None:
        self._inner.close(request_id)


def _spoil(token_id: int, position: int) -> int:
    return token_id if hash((position, 7)) % 5 == 0 else token_id ^ 1


def main() -> None:
    args = _parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(args.threads)
    contenders: list[Contender] = [_contender(args, length) for length in args.lengths]
    contenders.append(_contender(args, None))
    prompts = held_out_prompts(DEMO / "target", max(args.streams))
    print_rows(rows_of(race(contenders, prompts, args.streams, args.tokens, args.rounds)))
    for contender in contenders:
        contender.close()


def _contender(args: argparse.Namespace, length: int | None) -> EngineContender:
    """An engine with a fixed number of drafts, or an adaptive one for None."""
    speculation = (
        SpeculationConfig(4, max_num_tokens=MAX_LENGTH, adaptive=True) if length is None else SpeculationConfig(length)
    )
    model = ModelConfig(str(args.target), dtype=args.dtype, num_threads=args.threads)
    config = EngineConfig(model, CacheConfig(memory_bytes=CACHE_BYTES), speculation=speculation)
    name = "adaptive" if length is None else f"K = {length}"
    return EngineContender(name, EngineCore.from_config(config, _proposer(args)))


def _proposer(args: argparse.Namespace) -> Proposer:
    draft = ModelConfig(str(DEMO / "draft"), dtype=args.dtype)
    proposer = ModelProposer.from_config(draft, CacheConfig(memory_bytes=CACHE_BYTES // 8), SchedulerConfig())
    return SpoiledProposer(proposer) if args.bad_draft else proposer


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=DEMO / "target", help="folder of the target model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 16], help="prompts at once")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[0, 1, 2, 4, 8], help="fixed K; the first is the base"
    )
    parser.add_argument("--tokens", type=int, default=96, help="tokens to generate for each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions after one warm-up round")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--bad-draft", action="store_true", help="spoil the draft's tokens")
    return parser.parse_args()


if __name__ == "__main__":
    main()
