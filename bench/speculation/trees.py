"""Trees against chains of the same verification cost: tokens per pass on the padded fixture.

    python -m bench.speculation.trees --tokens 48 --prompts 4 --nodes 8

Every method verifies `--nodes` drafts per pass, so that its passes cost the target the same; a chain is as deep as it
has drafts, and a tree no deeper. The last row of a group is the chain of the depth that costs the draft model about as
many passes as the trees need. One target is shared by all methods, and each gets the same prompts and seeds.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.contenders.prompts import held_out_prompts
from bench.padded_pair import DEMO, padded_target
from bench.served.served_pair import CACHE_BYTES
from engine.accounting.engine_stats import EngineStats
from engine.config import CacheConfig, ModelConfig, ModelDtype, SchedulerConfig, SpeculationConfig, TreeConfig, TreeKind
from engine.engine_core import EngineCore, Speculation
from engine.kv_cache.block_manager import BlockManager
from engine.model.runner.model_runner import ModelRunner
from engine.proposer.draft_model.model_proposer import ModelProposer
from engine.sampling.sampler import Sampler
from engine.scheduler.scheduler import Scheduler
from engine.verifier.verifier import Verifier
from protos.messages import GenerateRequest, SamplingParams, VerifyMode


@dataclass(frozen=True, slots=True)
class Method:
    """A way to draft."""

    name: str
    depth: int
    tree: TreeConfig | None = None


def main() -> None:
    """Decode with each shape of drafts and print its figures."""
    args = _parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(args.threads)
    target = args.target or padded_target()
    runner = ModelRunner(ModelConfig(str(target), dtype=args.dtype), CacheConfig(memory_bytes=CACHE_BYTES))
    prompts = held_out_prompts(DEMO / "target", args.prompts)
    print(
        f"{'method':<22}{'verify':<11}{'T':<5}{'tokens/pass':>12}{'rows/pass':>11}{'tokens/s':>10}  accepted by depth"
    )
    for temperature in args.temperatures:
        for verify in args.verify:
            for method in _methods(args.nodes):
                engine = _engine(runner, method, verify, args.dtype)
                _generate(engine, prompts, args.tokens, temperature)
                _print_row(method, verify, temperature, engine.stats())


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8, help="drafts per pass")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to generate for each prompt")
    parser.add_argument("--prompts", type=int, default=4, help="prompts, one after the other")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7, 1.0])
    parser.add_argument("--verify", type=VerifyMode, nargs="+", default=[VerifyMode.COUPLED, VerifyMode.REJECTION])
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--dtype", default="bfloat16", help="of target and draft")
    parser.add_argument("--target", type=Path, help="folder of the target; the padded fixture if absent")
    return parser.parse_args()


def _methods(num_nodes: int) -> list[Method]:
    return [
        Method(f"chain of {num_nodes}", num_nodes),
        Method(f"dynamic tree of {num_nodes}", num_nodes, TreeConfig(TreeKind.DYNAMIC, num_nodes)),
        Method(f"static tree of {num_nodes}", num_nodes, TreeConfig(TreeKind.STATIC, num_nodes)),
        Method("chain of 4", 4),
    ]


def _engine(runner: ModelRunner, method: Method, verify: VerifyMode, dtype: str) -> EngineCore:
    draft = ModelConfig(str(DEMO / "draft"), dtype=ModelDtype(dtype))
    proposer = ModelProposer.from_config(
        draft, CacheConfig(memory_bytes=CACHE_BYTES // 8), SchedulerConfig(), tree=method.tree
    )
    blocks = BlockManager(runner.num_blocks, runner.block_size, runner.model_version)
    scheduler = Scheduler(SchedulerConfig(), blocks, runner.max_model_len, tree=method.tree)
    speculation = SpeculationConfig(method.depth, verify, tree=method.tree)
    return EngineCore(runner, scheduler, Speculation(proposer, Verifier(Sampler()), speculation))


def _generate(engine: EngineCore, prompts: Seq[Seq[int]], num_tokens: int, temperature: float) -> None:
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=temperature, max_tokens=num_tokens, seed=index)
        engine.add(GenerateRequest(str(index), tuple(prompt), sampling))
        while engine.has_work:
            engine.step()


def _print_row(method: Method, verify: VerifyMode, temperature: float, stats: EngineStats) -> None:
    drafts = stats.drafts
    rows = 1 + drafts.num_draft_tokens / drafts.num_drafts
    by_depth = " ".join(f"{count / drafts.num_drafts:.2f}" for count in drafts.num_accepted_tokens_per_pos)
    speed = (drafts.num_drafts + drafts.num_accepted_tokens) / stats.times.total_s
    print(
        f"{method.name:<22}{verify:<11}{temperature:<5}{drafts.acceptance_length:>12.2f}{rows:>11.1f}{speed:>10.1f}"
        f"  {by_depth}"
    )


if __name__ == "__main__":
    main()
