"""Sync against async drafting over the real channel: speed, hit rate, and what a round that hits costs.

    python -m bench.speculation.draft_disciplines --streams 1 4 --tokens 96 --rounds 3

Target and draft are two processes with a thread and a core each, as a pair has them on two cores. All contenders share
one engine and take turns on the same prompts and seeds: plain decoding; sync; async; a replay of async's very drafts,
which cost nothing there, so that its steps are bare verifications; sync with both cores for the target; and the draft
in the target's process, on its one core.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from actors.channel.channel_proposer import ChannelProposer
from actors.settings import DraftSettings, PairSettings
from actors.target.in_process_draft import InProcessDraft
from bench.contenders.draft_child import CORES, own_cores, start_draft
from bench.contenders.prompts import held_out_prompts
from bench.padded_pair import CACHE, DEMO, padded_target
from bench.speculation.switched_proposer import ReplayProposer, SwitchedProposer
from engine.accounting.step_times import StepTimes
from engine.config import CacheConfig, EngineConfig, ModelConfig, SpeculationConfig
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.proposer import Proposer
from engine.proposer.dispatch.no_proposer import NoProposer
from models.fixtures.padded_fixture import build_fixture
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod, VerifyMode


@dataclass(frozen=True, slots=True)
class Contender:
    """The source of drafts, and the target's threads."""

    name: str
    proposer: Proposer
    num_threads: int = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """One run. `hits` are the steps in which every sequence's drafts were there when the last one ended."""

    tokens_per_second: float
    num_tokens: int
    num_lookups: int
    num_hits: int
    steps: tuple[StepTimes, ...]
    hits: tuple[StepTimes, ...]


def main() -> None:
    """Race sync against async drafts and print their table."""
    args = _parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    target, draft = _target(args), _draft(args)
    settings = _settings(args, target, draft)
    prompts = held_out_prompts(DEMO / "target", max(args.streams))
    switch = SwitchedProposer()
    with ExitStack() as stack:
        sync = start_draft(settings, stack)
        ahead = start_draft(replace(settings, draft=replace(settings.draft, fan_out=args.fan_out)), stack)
        engine = load_engine(settings.engine, switch)
        contenders = [
            Contender("plain", NoProposer()),
            Contender("sync", sync),
            Contender("async", ahead),
            Contender("replay", ReplayProposer(switch.recorded)),
            Contender("sync, 2 threads", sync, num_threads=2),
            Contender("in process", InProcessDraft.load(settings)),
        ]
        for temperature in args.temperatures:
            for num_streams in args.streams:
                runs = _race(args, engine, switch, contenders, prompts[:num_streams], temperature)
                _print(f"T={temperature} streams={num_streams}", runs)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4], help="prompts at once")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--tokens", type=int, default=96, help="tokens to generate for each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions; the table quotes medians")
    parser.add_argument("--num-draft-tokens", type=int, default=3, help="K")
    parser.add_argument("--fan-out", type=int, default=3, help="outcomes per position that async drafts for")
    parser.add_argument("--verify", choices=list(VerifyMode), default=VerifyMode.COUPLED)
    parser.add_argument("--unpadded", action="store_true", help="the demo target itself, not the padded fixture")
    parser.add_argument("--draft-layers", type=int, help="pad the draft to so many layers: a larger draft's cost")
    parser.add_argument("--draft-mlp", type=int, default=2048, help="and to this MLP width")
    parser.add_argument("--dtype", default="bfloat16", help="of the target")
    parser.add_argument("--draft-dtype", default="float32", help="of the draft; float32 is faster for one so small")
    return parser.parse_args()


def _target(args: argparse.Namespace) -> Path:
    return DEMO / "target" if args.unpadded else padded_target()


def _draft(args: argparse.Namespace) -> Path:
    if not args.draft_layers:
        return DEMO / "draft"
    folder = CACHE / f"padded-draft-{args.draft_layers}-{args.draft_mlp}"
    if not (folder / "config.json").exists():
        build_fixture(DEMO / "draft", folder, args.draft_layers, args.draft_mlp)
    return folder


def _settings(args: argparse.Namespace, target: Path, draft: Path) -> PairSettings:
    engine = EngineConfig(
        ModelConfig(str(target), dtype=args.dtype, num_threads=1),
        CacheConfig(memory_bytes=1 << 29),
        speculation=SpeculationConfig(args.num_draft_tokens, VerifyMode(args.verify)),
    )
    model = ModelConfig(str(draft), dtype=args.draft_dtype, num_threads=1)
    return PairSettings(engine, DraftSettings(SpeculationMethod.MODEL, model, CacheConfig(memory_bytes=1 << 27)))


def _race(
    args: argparse.Namespace,
    engine: EngineCore,
    switch: SwitchedProposer,
    contenders: Seq[Contender],
    prompts: Seq[list[int]],
    temperature: float,
) -> dict[str, list[Measured]]:
    """Return every contender in turn, `rounds` times after a warm-up; the replay right after what it replays."""
    runs: dict[str, list[Measured]] = {contender.name: [] for contender in contenders}
    for round_index in range(args.rounds + 1):
        for contender in contenders:
            switch.current = contender.proposer
            if not isinstance(contender.proposer, ReplayProposer):
                switch.recorded.clear()
            torch.set_num_threads(contender.num_threads)
            own_cores(CORES[: contender.num_threads])
            measured = _run(
                engine, contender.proposer, prompts, args.tokens, temperature, f"{contender.name}{round_index}"
            )
            if round_index > 0:
                runs[contender.name].append(measured)
    return runs


def _run(
    engine: EngineCore, proposer: Proposer, prompts: Seq[list[int]], num_tokens: int, temperature: float, salt: str
) -> Measured:
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=temperature, seed=index, max_tokens=num_tokens)
        # A salt per run keeps the prefix cache of the run before out of the comparison.
        engine.add(GenerateRequest(str(index), tuple(prompt), sampling, cache_salt=salt))
    began_s = time.perf_counter()
    before = (0, 0)
    first = _lookups(proposer)
    steps, hit_steps, num_generated = [], [], 0
    while engine.has_work:
        if isinstance(proposer, ChannelProposer):
            proposer.flush()  # as the engine's loop does before every step
        known = _lookups(proposer)
        is_hit = known[0] - before[0] == known[1] - before[1] > 0
        before = known
        num_generated += sum(len(chunk.token_ids) for chunk in engine.step())
        steps.append(engine.last_times)
        if is_hit and len(steps) > 1:
            hit_steps.append(steps[-1])
    seconds = time.perf_counter() - began_s
    last = _lookups(proposer)
    return Measured(
        num_generated / seconds,
        num_generated,
        last[0] - first[0],
        last[1] - first[1],
        tuple(steps[1:]),
        tuple(hit_steps),
    )


def _lookups(proposer: Proposer) -> tuple[int, int]:
    if not isinstance(proposer, ChannelProposer):
        return 0, 0
    return proposer.stats.num_lookups, proposer.stats.num_hits


def _print(title: str, runs: dict[str, list[Measured]]) -> None:
    columns = "tok/s (min-max)         against sync  tokens/pass  hit rate   ms per step: waiting  forward    all"
    print(f"\n{title:20} {columns}")
    for name, measured in runs.items():
        speeds = [each.tokens_per_second for each in measured]
        ratio = statistics.median(
            each.tokens_per_second / other.tokens_per_second for each, other in zip(measured, runs["sync"], strict=True)
        )
        lookups, hits = sum(each.num_lookups for each in measured), sum(each.num_hits for each in measured)
        steps = [step for each in measured for step in each.steps]
        per_pass = sum(each.num_tokens for each in measured) / len(steps)
        print(
            f"{name:20} {statistics.median(speeds):6.1f} ({min(speeds):6.1f}-{max(speeds):6.1f}) {ratio:10.3f}"
            f" {per_pass:13.2f} {hits / lookups if lookups else 0.0:10.3f} {_split(steps)}"
        )
    hit_steps = [step for each in runs["async"] for step in each.hits]
    if hit_steps:
        bare = statistics.median(step.total_s for each in runs["replay"] for step in each.steps)
        cost = statistics.median(step.total_s for step in hit_steps) / bare
        print(
            f"{'  a round that hits':57} {len(hit_steps):24d} {_split(hit_steps)}   {cost:.3f} of a bare verification"
        )


def _split(steps: Seq[StepTimes]) -> str:
    """Medians of what a step waits for its drafts, of its forward, and of all of it."""
    medians = (statistics.median(getattr(step, part) for step in steps) for part in ("draft_s", "forward_s", "total_s"))
    return f"{'':12}" + "".join(f"{1e3 * median:9.2f}" for median in medians)


if __name__ == "__main__":
    main()
