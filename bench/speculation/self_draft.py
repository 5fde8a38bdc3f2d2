"""A target's own weights as its draft (`draft.kind: self`): speed against plain decoding, acceptance by position.

    python -m bench.speculation.self_draft --target .cache/models/smollm2-135m-instruct --streams 1 4 8

Each draft has two engines in this process, on one thread. Plain decoding, a fixed K and, in the second engine, adaptive
lengths take turns, and the ratio is of tokens per second of this process's CPU time: other work on the machine takes
less part in it than in the wall clock. Prompts are the chats below, or held-out Python where the target has no chat
template.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from bench.contenders.prompts import held_out_prompts
from engine.accounting.engine_stats import DraftStats
from engine.config import (
    CacheConfig,
    EngineConfig,
    HeadConfig,
    HeadKind,
    ModelConfig,
    Quantization,
    SpeculationConfig,
)
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from protos.messages import GenerateRequest, SamplingParams, SpeculationMethod, SpeculationParams
from router.tokenizer.tokenizer_files import load_tokenizer_files

_CHATS = (
    "Explain why the sky is blue in a few sentences.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "What are the benefits of regular exercise?",
    "Tell me a short story about a lighthouse keeper.",
    "How do I cook rice so that it is not sticky?",
    "Summarize the causes of the First World War.",
    "Describe the water cycle to a child.",
    "Give me five tips for a job interview.",
)


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to decode: an engine, and K of its requests; None leaves the lengths to the engine's budget."""

    name: str
    engine: EngineCore
    num_drafts: int | None


@dataclass(frozen=True, slots=True)
class Run:
    """One contender's round."""

    tokens_per_cpu_s: float
    tokens_per_pass: float
    drafts: DraftStats


def main() -> None:
    """Race the drafts and print a table for each temperature and number of streams."""
    args = _parse_args()
    logging.basicConfig(level=logging.WARNING)
    prompts = _prompts(args.target, max(args.streams))
    engines = {each: (_engine(args, each), _engine(args, each, is_adaptive=True)) for each in args.drafts}
    for temperature in args.temperatures:
        for num_streams in args.streams:
            print(f"\nT={temperature} streams={num_streams}: against plain, tokens per pass, accepted at each position")
            for name, (engine, adaptive) in engines.items():
                contenders = [Contender("plain", engine, 0)]
                contenders += [Contender(f"{name}, K={k}", engine, k) for k in args.num_draft_tokens]
                contenders.append(Contender(f"{name}, adaptive", adaptive, None))
                _print(_race(args, contenders, prompts[:num_streams], temperature))


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--dtype", default="bfloat16", help="of the target")
    parser.add_argument("--drafts", nargs="+", default=["int4"], help="int4, int8, or a number of layers")
    parser.add_argument("--num-draft-tokens", type=int, nargs="+", default=[1, 3], help="K")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 4, 8], help="prompts at once")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.7])
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate for each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved repetitions; the table quotes medians")
    return parser.parse_args()


def _engine(args: argparse.Namespace, draft: str, *, is_adaptive: bool = False) -> EngineCore:
    head = HeadConfig(HeadKind.SELF, num_layers=int(draft)) if draft.isdigit() else None
    return load_engine(
        EngineConfig(
            ModelConfig(str(args.target), args.dtype, num_threads=1),
            CacheConfig(memory_bytes=1 << 28),
            speculation=SpeculationConfig(3, methods=(SpeculationMethod.SELF,), adaptive=is_adaptive),
            head=head or HeadConfig(HeadKind.SELF, quantization=Quantization(draft)),
        )
    )


def _prompts(target: Path, num_prompts: int) -> list[list[int]]:
    template = load_tokenizer_files(str(target)).chat_template
    if template is None:
        return held_out_prompts(target, num_prompts)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    texts = [template.render([{"role": "user", "content": each}]) for each in _CHATS]
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return [prompts[index % len(prompts)] for index in range(num_prompts)]


def _race(
    args: argparse.Namespace, contenders: Seq[Contender], prompts: Seq[list[int]], temperature: float
) -> dict[str, list[Run]]:
    runs: dict[str, list[Run]] = {contender.name: [] for contender in contenders}
    for number in range(args.rounds + 1):
        for contender in contenders:
            run = _run(contender, prompts, SamplingParams(temperature=temperature, max_tokens=args.tokens), number)
            if number > 0:
                runs[contender.name].append(run)
    return runs


def _run(contender: Contender, prompts: Seq[list[int]], sampling: SamplingParams, number: int) -> Run:
    """Decode every prompt at once; prompts are in the prefix cache after the first round, and count little."""
    engine, wish = contender.engine, SpeculationParams(num_tokens=contender.num_drafts)
    for index, prompt in enumerate(prompts):
        engine.add(GenerateRequest(f"{contender.name} {number} {index}", tuple(prompt), sampling, wish))
    before, num_tokens, num_steps = engine.stats().drafts, 0, 0
    began_s = time.process_time()
    while engine.has_work:
        num_tokens += sum(len(chunk.token_ids) for chunk in engine.step())
        num_steps += 1
    seconds = time.process_time() - began_s
    return Run(num_tokens / seconds, num_tokens / len(prompts) / num_steps, _since(before, engine.stats().drafts))


def _since(before: DraftStats, after: DraftStats) -> DraftStats:
    counts = list(after.num_accepted_tokens_per_pos)
    for position, count in enumerate(before.num_accepted_tokens_per_pos):
        counts[position] -= count
    return DraftStats(after.num_drafts - before.num_drafts, num_accepted_tokens_per_pos=tuple(counts))


def _print(runs: dict[str, list[Run]]) -> None:
    plain = runs["plain"]
    for name, rounds in runs.items():
        ratios = [one.tokens_per_cpu_s / other.tokens_per_cpu_s for one, other in zip(rounds, plain, strict=True)]
        speed = statistics.median(run.tokens_per_cpu_s for run in rounds)
        per_pass = statistics.median(run.tokens_per_pass for run in rounds)
        print(f"{name:18} {speed:7.1f} tok/s  {statistics.median(ratios):6.3f}  {per_pass:5.2f}  {_acceptance(rounds)}")


def _acceptance(rounds: Seq[Run]) -> str:
    """Shares of drafts that stood where those before them did, position by position."""
    depth = max((len(run.drafts.num_accepted_tokens_per_pos) for run in rounds), default=0)
    shares, reached = [], sum(run.drafts.num_drafts for run in rounds)
    for position in range(min(depth, 6)):
        stood = sum(sum(run.drafts.num_accepted_tokens_per_pos[position : position + 1]) for run in rounds)
        if reached == 0 or stood == 0:
            break
        shares.append(f"{stood / reached:.2f}")
        reached = stood
    return " ".join(shares)


if __name__ == "__main__":
    main()
