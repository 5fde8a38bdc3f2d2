"""The texts of the suite, and a run of them on an engine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

from tokenizers import Tokenizer

from bench.contenders.prompts import held_out_prompts
from engine.engine_core import EngineCore
from protos.messages import GenerateRequest, SamplingParams

Prompts = Seq[Seq[int]]


def demo_text(model_path: Path, num_streams: int) -> Prompts:
    """Return prompts of Python that the demo pair was not trained on."""
    return held_out_prompts(model_path, num_streams)


def questions(model_path: Path, path: Path, num_streams: int, max_prompt_tokens: int) -> Prompts:
    """Return first turns of Spec-Bench or MT-bench questions, evenly over the file to cover every category."""
    tokenizer = Tokenizer.from_file(str(model_path / "tokenizer.json"))
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    chosen = [lines[index * len(lines) // num_streams] for index in range(num_streams)]
    return [tokenizer.encode(line["turns"][0], add_special_tokens=False).ids[:max_prompt_tokens] for line in chosen]


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The figures of a run.

    `accepted_by_position[i]` is the share of passes with drafts that accepted more than i of them.
    """

    num_tokens: int
    num_passes: int  # per sequence: a batch of 8 that decodes once counts 8
    seconds: float
    accepted_by_position: tuple[float, ...]

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def tokens_per_pass(self) -> float:
        return self.num_tokens / self.num_passes


def measure(
    core: EngineCore,
    prompts: Prompts,
    sampling: SamplingParams,
    before_step: Callable[[], None],
    on_tokens: Callable[[str, Seq[int]], None] = lambda request_id, token_ids: None,
) -> RunFigures:
    """Run all prompts at once to the end, with one `sampling` except for seeds.

    `before_step` is called before each pass, and `on_tokens` with the committed tokens of each request.
    """
    before = core.stats().drafts
    num_tokens, num_passes = 0, 0
    began_s = time.perf_counter()
    # All runs share a salt: prompts are prefilled once, and the clock measures decoding.
    for index, prompt in enumerate(prompts):
        core.add(GenerateRequest(str(index), tuple(prompt), replace(sampling, seed=index)))
    while core.has_work:
        before_step()
        for chunk in core.step():
            num_tokens += len(chunk.token_ids)
            num_passes += 1
            on_tokens(chunk.request_id, chunk.token_ids)
    seconds = time.perf_counter() - began_s
    after = core.stats().drafts
    num_drafted = after.num_drafts - before.num_drafts
    earlier = (*before.num_accepted_tokens_per_pos, *[0] * len(after.num_accepted_tokens_per_pos))
    accepted = [now - then for now, then in zip(after.num_accepted_tokens_per_pos, earlier, strict=False)]
    return RunFigures(num_tokens, num_passes, seconds, tuple(count / max(1, num_drafted) for count in accepted))
