"""More text to train on, which the target writes itself, and with it the log of its likeliest tokens.

A log of some minutes has too little text for a draft to learn from. Its prompts are scarce, but the target can continue
each one in more ways than the logged answer. Before there is any log, a chat model that reads the beginning of a user's
turn continues it with a question like those of its training (arXiv:2406.08464), and can answer it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine.engine_core.core import EngineCore
from engine.engine_core.loading import load_engine
from engine.model.runner.model_runner import ModelRunner
from engine.position_log.shard import LoggedRequest, log_files, read_shard
from protos.errors import ConfigError
from protos.messages import GREEDY_BELOW, GenerateRequest, SamplingParams
from tuning.drafts import partial_of
from tuning.log_windows import Log

_NUM_STREAMS = 64
_QUESTION_TOKENS = 96
_TEMPERATURES = (0.0, 0.7)  # of the answers, in turn


def write_rollouts(
    target: str, log: Log, folder: Path, minutes: float, on_progress: Callable[[float], None]
) -> Sequence[LoggedRequest]:
    """Let the target continue the training prompts for `minutes`, and return the texts.

    The texts of an earlier call in `folder` are returned at once; a killed call starts again.

    Raises:
        ConfigError: the target cannot be loaded here.
    """
    if not folder.is_dir():
        partial = partial_of(folder)
        partial.mkdir(parents=True)
        _write(target, prompts_of(log), partial, minutes, on_progress)
        partial.rename(folder)
    return [request for file in log_files(folder) for request in read_shard(file) if len(request.positions)]


def prompts_of(log: Log) -> list[GenerateRequest]:
    """Return requests without ids: of each distinct prompt for training that no measuring request has."""
    measuring = {_prompt(request) for request in log.held_out}
    found = {}
    for request in log.training:
        token_ids = _prompt(request)
        if token_ids and token_ids not in measuring:
            is_greedy = request.temperature < GREEDY_BELOW
            # After greedy requests, 0.3 gives similar but not equal texts.
            temperature = 0.3 if is_greedy else request.temperature
            num_tokens = max(64, len(request.token_ids) - len(token_ids))
            sampling = SamplingParams(
                temperature=temperature, max_tokens=num_tokens, repetition_penalty=request.repetition_penalty
            )
            found[token_ids, temperature] = GenerateRequest("", token_ids, sampling, is_logged=True)
    return list(found.values())


def _prompt(request: LoggedRequest) -> tuple[int, ...]:
    return tuple(request.token_ids[: int(request.positions[0])].tolist())


def _engine(target: str, folder: Path) -> tuple[EngineCore, ModelRunner]:
    """Return an engine that logs into `folder`, and its model. Raises ConfigError if the target cannot be loaded."""
    core = load_engine(
        EngineConfig(
            ModelConfig(target, num_threads=torch.get_num_threads()),
            CacheConfig(memory_bytes=1 << 30),  # each prompt of a small target is prefilled once and continued often
            SchedulerConfig(max_num_sequences=_NUM_STREAMS),
            log=str(folder),
        )
    )
    runner = core.runner
    assert isinstance(runner, ModelRunner), "from_config loads one"
    return core, runner


def _write(
    target: str, prompts: Sequence[GenerateRequest], folder: Path, minutes: float, on_progress: Callable[[float], None]
) -> None:
    core, runner = _engine(target, folder)
    requests = _requests(_fitting(prompts, runner.max_model_len), runner.eos_token_ids)
    running: set[str] = set()
    began_s, seconds = time.monotonic(), 60.0 * minutes
    try:
        while (elapsed_s := time.monotonic() - began_s) < seconds:
            on_progress(elapsed_s / seconds)
            # Keep all streams busy until the time is over.
            while len(running) < _NUM_STREAMS:
                request = next(requests)
                core.add(request)
                running.add(request.request_id)
            running -= {chunk.request_id for chunk in core.step() if chunk.finish_reason is not None}
        for request_id in running:
            core.abort(request_id)
    finally:
        core.close()


def _fitting(prompts: Sequence[GenerateRequest], max_model_len: int) -> list[GenerateRequest]:
    room = [max_model_len - len(prompt.prompt_token_ids) for prompt in prompts]
    return [
        replace(prompt, sampling=replace(prompt.sampling, max_tokens=min(prompt.sampling.max_tokens, tokens)))
        for prompt, tokens in zip(prompts, room, strict=True)
        if tokens >= 0.25 * max_model_len  # a longer prompt leaves no room
    ]


def _requests(prompts: Sequence[GenerateRequest], end_ids: tuple[int, ...]) -> Iterator[GenerateRequest]:
    """Yield a request of each prompt in turn, again and again with other seeds."""
    if not prompts:
        raise ConfigError("the log has no prompt that the target could continue; give --rollouts 0")
    seed = 0
    while True:
        for prompt in prompts:
            seed += 1
            sampling = replace(prompt.sampling, seed=seed, stop_token_ids=end_ids)
            yield replace(prompt, request_id=f"rollout-{seed}", sampling=sampling)


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
    core, runner = _engine(target, partial)
    try:
        ends = runner.eos_token_ids
        questions = _questions(core, before, ends, num_chats, lambda share: on_progress(0.2 * share))
        if not questions:
            raise ConfigError(
                f"{target} was asked for {num_chats} questions and wrote none of at most {_QUESTION_TOKENS} tokens; "
                "train on --traffic or --log"
            )
        requests = (
            GenerateRequest(
                f"answer-{seed}",
                (*before, *question, *after),
                SamplingParams(seed, _TEMPERATURES[seed % 2], max_tokens=256, stop_token_ids=ends),
                is_logged=True,
            )
            for seed, question in enumerate(questions)
        )
        for _ in _answers(core, requests, lambda count: on_progress(0.2 + 0.8 * count / len(questions))):
            pass
    finally:
        core.close()
    partial.rename(folder)


def _questions(
    core: EngineCore,
    before: tuple[int, ...],
    ends: tuple[int, ...],
    num_chats: int,
    on_progress: Callable[[float], None],
) -> list[tuple[int, ...]]:
    """Return the different questions that the model writes at the place of a user's turn, without their end."""
    requests = (
        GenerateRequest(
            f"question-{seed}", before, SamplingParams(seed, 1.0, max_tokens=_QUESTION_TOKENS, stop_token_ids=ends)
        )
        for seed in range(num_chats)
    )
    done = _answers(core, requests, lambda count: on_progress(count / num_chats))
    return sorted({ids[:-1] for _, ids in done if len(ids) > 1 and ids[-1] in ends})


def _answers(
    core: EngineCore, requests: Iterator[GenerateRequest], on_count: Callable[[int], None]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the id and output of each request as it ends."""
    running: dict[str, list[int]] = {}
    count = 0
    while True:
        while len(running) < _NUM_STREAMS and (request := next(requests, None)) is not None:
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
