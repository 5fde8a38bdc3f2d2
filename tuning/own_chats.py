"""Chats that a target writes alone: questions that its chat template's beginning calls for, and its answers.

A chat model that reads the beginning of a user's turn continues it with a question like those of its training
(arXiv:2406.08464). So a draft can be trained before there is any traffic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from engine.engine_core.core import EngineCore
from protos.errors import ConfigError
from protos.messages import GenerateRequest, SamplingParams
from tuning.draft import partial_of
from tuning.rollouts import NUM_STREAMS, rollout_engine

_TEMPERATURES = (0.0, 0.7)  # of the answers, in turn


def write_own_chats(
    target: str,
    before: tuple[int, ...],
    after: tuple[int, ...],
    folder: Path,
    num_chats: int,
    on_progress: Callable[[float], None],
) -> None:
    """Log up to `num_chats` chats in `folder`, unless an earlier call has done so; a killed call starts again.

    Args:
        target: its folder.
        before: the tokens of its chat template before a question.
        after: the tokens between a question and its answer.
        folder: for the log.
        num_chats: some questions are equal, or do not end; they are not answered.
        on_progress: called with the share that is done.

    Raises:
        ConfigError: the target cannot be loaded here, or continues its template with no question that ends.
    """
    if folder.is_dir():
        return
    partial = partial_of(folder)
    partial.mkdir(parents=True)
    core, runner = rollout_engine(target, partial)
    try:
        ends = runner.eos_token_ids
        num_asked = 96  # tokens of a question
        asked = (
            GenerateRequest(
                f"question-{seed}",
                before,
                SamplingParams(seed, 1.0, max_tokens=num_asked, stop_token_ids=ends),
            )
            for seed in range(num_chats)
        )
        done = dict(_answers(core, asked, lambda count: on_progress(0.2 * count / num_chats)))
        questions = {ids[:-1] for ids in done.values() if len(ids) > 1 and ids[-1] in ends}
        if not questions:
            raise ConfigError(
                f"{target} was asked for {num_chats} questions and wrote none of at most {num_asked} tokens; "
                "train on --traffic or --log"
            )
        prompts = [(*before, *ids, *after) for ids in sorted(questions)]
        answered = (
            GenerateRequest(
                f"answer-{seed}",
                prompt,
                SamplingParams(seed, _TEMPERATURES[seed % 2], max_tokens=256, stop_token_ids=ends),
                is_logged=True,
            )
            for seed, prompt in enumerate(prompts)
        )
        for _ in _answers(core, answered, lambda count: on_progress(0.2 + 0.8 * count / len(prompts))):
            pass
    finally:
        core.close()
    partial.rename(folder)


def _answers(
    core: EngineCore, requests: Iterator[GenerateRequest], on_count: Callable[[int], None]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the id and output of each request as it ends."""
    running: dict[str, list[int]] = {}
    count = 0
    while True:
        while len(running) < NUM_STREAMS and (request := next(requests, None)) is not None:
            core.add(request)
            running[request.request_id] = []
        if not running:
            return
        for chunk in core.step():
            running[chunk.request_id] += chunk.token_ids
            if chunk.finish_reason is not None:
                count += 1
                on_count(count)
                yield chunk.request_id, tuple(running.pop(chunk.request_id))
