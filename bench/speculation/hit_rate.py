"""The rate at which a pass's drafts are prepared before the pass before it is decided, given time enough.

    python -m bench.speculation.hit_rate --fan-outs 1 2 3 4

The demo pair itself, in this process: its text and the draft's acceptance are the padded fixture's, which
has the same logits. `bench.speculation.draft_disciplines` has the time.
"""

from __future__ import annotations

import argparse
import logging
from itertools import product

from bench.contenders.prompts import held_out_prompts
from bench.padded_pair import DEMO
from bench.speculation.ahead_proposer import AheadProposer
from engine.config import CacheConfig, EngineConfig, ModelConfig, ModelDtype, SchedulerConfig, SpeculationConfig
from engine.engine_core.loading import load_engine
from engine.proposer.draft_model.model_proposer import ModelProposer
from protos.messages import GenerateRequest, SamplingParams, VerifyMode

CACHE = CacheConfig(num_blocks=2048, memory_bytes=None)


def main() -> None:
    """Print the rate of prepared drafts for each mode, temperature and fan-out."""
    args = _parse_args()
    logging.basicConfig(level=logging.WARNING)
    prompts = held_out_prompts(DEMO / "target", args.prompts)
    draft = ModelConfig(str(DEMO / "draft"), dtype=ModelDtype.FLOAT32, num_threads=1)
    proposer = ModelProposer.from_config(draft, CACHE, SchedulerConfig())
    print(f"{'verify':12}{'T':>5}{'K':>4}" + "".join(f"{f'F={each}':>8}" for each in args.fan_outs))
    for verify, temperature, num_drafts in product(args.modes, args.temperatures, args.num_draft_tokens):
        rates = [_rate(args, proposer, prompts, verify, temperature, num_drafts, each) for each in args.fan_outs]
        print(f"{verify:12}{temperature:5.1f}{num_drafts:4d}" + "".join(f"{rate:8.3f}" for rate in rates))


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=96, help="tokens to generate for each prompt")
    parser.add_argument("--modes", nargs="+", default=[str(mode) for mode in VerifyMode])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[3], help="K")
    parser.add_argument("--fan-outs", type=int, nargs="+", default=[1, 2, 3, 4], help="outcomes per position")
    return parser.parse_args()


def _rate(
    args: argparse.Namespace,
    proposer: ModelProposer,
    prompts: list[list[int]],
    verify: str,
    temperature: float,
    num_drafts: int,
    fan_out: int,
) -> float:
    target = ModelConfig(str(DEMO / "target"), dtype=ModelDtype.FLOAT32, num_threads=1)
    ahead = AheadProposer(proposer, fan_out)
    config = EngineConfig(target, CACHE, speculation=SpeculationConfig(num_drafts, VerifyMode(verify)))
    engine = load_engine(config, ahead)
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=temperature, seed=index, max_tokens=args.tokens)
        engine.add(GenerateRequest(str(index), tuple(prompt), sampling))
    while engine.has_work:
        engine.step()
    return ahead.num_hits / ahead.num_lookups


if __name__ == "__main__":
    main()
