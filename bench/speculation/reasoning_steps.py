"""Reasoning steps that the draft writes (not exact): accuracy against the target alone, and speed beside it.

    python -m bench.speculation.reasoning_steps --target .cache/models/smollm2-135m-instruct

The task is arithmetic word problems made here, with answers, after worked examples. The draft is the target's own
weights in int4 as a model of its own, unless `--draft` names another. Contenders answer the same problems, greedily and
in the same batches: the target alone, with exact drafts, the draft alone, and reasoning steps at every judge and
threshold. Speeds are tokens per second of this process's CPU time on one thread, as ratios of the target alone in the
same round: other work on the machine takes less part in it than in the wall clock.
"""

from __future__ import annotations

import argparse
import logging
import random
import re
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path

from transformers import GenerationConfig

from engine.config import (
    CacheConfig,
    EngineConfig,
    ModelConfig,
    ModelDtype,
    Quantization,
    SchedulerConfig,
    ScorerKind,
    SpeculationConfig,
    StepConfig,
)
from engine.engine_core import EngineCore
from engine.engine_core.loading import load_engine
from engine.proposer.draft_model.model_proposer import ModelProposer
from protos.messages import GenerateRequest, SamplingParams, SpeculationParams, StepStats
from router.tokenizer.tokenizer_files import load_tokenizer_files

_NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gina", "Hugo")
_THINGS = ("apples", "books", "coins", "stamps", "marbles", "pencils", "shells", "cards")
_RATING_PROMPT = "\n\nIs this step right? Rating from 0 (wrong) to 9 (right): "
_ANSWER = re.compile(r"Answer: *\$?(-?\d+)")


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, its solution line by line, and the answer."""

    question: str
    steps: tuple[str, ...]
    answer: int

    @property
    def solution(self) -> str:
        return "\n".join((*self.steps, f"Answer: {self.answer}"))


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to answer: an engine and what its requests ask for."""

    name: str
    engine: EngineCore
    speculation: SpeculationParams


@dataclass(slots=True)
class Tally:
    """The sums of a contender over all rounds."""

    num_right: int = 0
    num_problems: int = 0
    num_tokens: int = 0
    steps: StepStats = field(default_factory=StepStats)
    tokens_per_cpu_s: list[float] = field(default_factory=list)


def main() -> None:
    """Answer the problems in turn and print the table."""
    args = _parse_args()
    logging.basicConfig(level=logging.WARNING)
    contenders = _contenders(args)
    tallies = {each.name: Tally() for each in contenders}
    prompt_of, text_of = _texts(args.target)
    make = random.Random(args.seed)
    for number in range(args.rounds):
        examples = [_problem(make, 2) for _ in range(args.examples)]
        problems = [_problem(make, args.steps) for _ in range(args.problems)]
        prompts = [prompt_of(examples, problem) for problem in problems]
        for contender in contenders:
            _answer(contender, number, prompts, problems, text_of, args, tallies[contender.name])
    _print(tallies)


def _parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="a checkpoint of the target's vocabulary; else the target in int4")
    parser.add_argument("--thresholds", type=float, nargs="+", default=[5.0, 7.0, 8.5])
    parser.add_argument("--problems", type=int, default=16, help="of a round, all at once")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--examples", type=int, default=8, help="worked ones before each problem")
    parser.add_argument("--steps", type=int, default=2, help="of arithmetic in a problem")
    parser.add_argument("--tokens", type=int, default=96, help="at most, of an answer")
    parser.add_argument("--num-draft-tokens", type=int, default=3, help="K of exact drafts")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _problem(make: random.Random, num_steps: int) -> Problem:
    """Return a problem of `num_steps` sums, differences and products of small numbers."""
    name, thing, amount = make.choice(_NAMES), make.choice(_THINGS), make.randint(3, 20)
    sentences, steps = [f"{name} has {amount} {thing}."], []
    for _ in range(num_steps):
        kinds = ("more", *("away",) * (amount > 1), *("times",) * (0 < amount <= 30))
        kind, change = make.choice(kinds), make.randint(1, min(12, max(1, amount - 1)))
        if kind == "more":
            sign, total, text = "+", amount + change, f"{name} gets {change} more."
        elif kind == "away":
            sign, total, text = "-", amount - change, f"{name} gives {change} away."
        else:
            change = make.randint(2, 4)
            sign, total, text = "*", amount * change, f"Then {name} has {change} times as many."
        sentences.append(text)
        steps.append(f"{name} has {amount} {sign} {change} = {total} {thing}.")
        amount = total
    return Problem(" ".join([*sentences, f"How many {thing} does {name} have now?"]), tuple(steps), amount)


def _texts(target: Path) -> tuple[Callable[[Seq[Problem], Problem], list[int]], Callable[[Seq[int]], str]]:
    """Return the function from examples and a problem to a prompt, and the one from tokens to text."""
    files = load_tokenizer_files(str(target))

    def prompt_of(examples: Seq[Problem], problem: Problem) -> list[int]:
        if files.chat_template is None:
            shown = "".join(f"Question: {each.question}\n{each.solution}\n\n" for each in examples)
            return list(files.tokenizer.encode(f"{shown}Question: {problem.question}\n"))
        messages = [
            message
            for each in examples
            for message in ({"role": "user", "content": each.question}, {"role": "assistant", "content": each.solution})
        ]
        text = files.chat_template.render([*messages, {"role": "user", "content": problem.question}])
        return list(files.tokenizer.encode(text, add_special_tokens=False))

    return prompt_of, files.tokenizer.decode


def _contenders(args: argparse.Namespace) -> list[Contender]:
    target = ModelConfig(str(args.target), ModelDtype.BFLOAT16, num_threads=1)
    draft = (
        ModelConfig(str(args.draft), ModelDtype.BFLOAT16, num_threads=1)
        if args.draft
        else ModelConfig(str(args.target), ModelDtype.BFLOAT16, quantization=Quantization.INT4, num_threads=1)
    )
    cache, scheduler = CacheConfig(memory_bytes=1 << 29), SchedulerConfig()
    proposer = ModelProposer.from_config(draft, cache, scheduler)

    def engine(model: ModelConfig, steps: StepConfig | None = None, *, is_drafted: bool = True) -> EngineCore:
        speculation = SpeculationConfig(args.num_draft_tokens, steps=steps, adaptive=False)
        config = EngineConfig(model, cache, scheduler, speculation)
        return load_engine(config, proposer if is_drafted else None)

    exact = engine(target)
    contenders = [
        Contender("target alone", exact, SpeculationParams(enabled=False)),
        Contender(f"exact drafts, K={args.num_draft_tokens}", exact, SpeculationParams()),
        Contender("draft alone", engine(draft, is_drafted=False), SpeculationParams(enabled=False)),
    ]
    for judge in ScorerKind:
        steps = StepConfig(judge=judge, rating_prompt=_RATING_PROMPT, step_end="\n", think=None)
        stepping = engine(target, steps)
        contenders += [
            Contender(f"{judge} {each:g}", stepping, SpeculationParams(is_approximate=True, threshold=each))
            for each in args.thresholds
        ]
    return contenders


def _answer(
    contender: Contender,
    number: int,
    prompts: Seq[list[int]],
    problems: Seq[Problem],
    text_of: Callable[[Seq[int]], str],
    args: argparse.Namespace,
    tally: Tally,
) -> None:
    """Answer all prompts at once and add the outcome to the tally."""
    ends = GenerationConfig.from_pretrained(args.target).eos_token_id
    stop_token_ids = tuple(ends) if isinstance(ends, list) else (ends,) if ends is not None else ()
    sampling = SamplingParams(temperature=0.0, max_tokens=args.tokens, stop_token_ids=stop_token_ids)
    outputs: dict[str, list[int]] = {}
    began_s = time.process_time()
    for index, prompt in enumerate(prompts):
        name = f"{contender.name} {number} {index}"
        outputs[name] = []
        contender.engine.add(GenerateRequest(name, tuple(prompt), sampling, contender.speculation))
    while contender.engine.has_work:
        for chunk in contender.engine.step():
            outputs[chunk.request_id] += chunk.token_ids
            if chunk.finish_reason is not None and chunk.steps is not None:
                tally.steps += chunk.steps
    seconds = time.process_time() - began_s
    for output, problem in zip(outputs.values(), problems, strict=True):
        found = _ANSWER.search(text_of(output))
        tally.num_right += found is not None and int(found[1]) == problem.answer
    num_tokens = sum(map(len, outputs.values()))
    tally.num_problems += len(problems)
    tally.num_tokens += num_tokens
    tally.tokens_per_cpu_s.append(num_tokens / seconds)


def _print(tallies: dict[str, Tally]) -> None:
    plain = tallies["target alone"].tokens_per_cpu_s
    print("| | right | of the target's speed | tokens by the draft | steps taken |\n|---|---|---|---|---|")
    for name, tally in tallies.items():
        speed = statistics.median(one / other for one, other in zip(tally.tokens_per_cpu_s, plain, strict=True))
        drafted = taken = ""
        if tally.steps.num_judged:
            drafted = f"{tally.steps.num_accepted_tokens / tally.num_tokens:.0%}"
            taken = f"{tally.steps.num_accepted} of {tally.steps.num_judged}"
        print(f"| {name} | {tally.num_right} of {tally.num_problems} | {speed:.2f} | {drafted} | {taken} |")


if __name__ == "__main__":
    main()
