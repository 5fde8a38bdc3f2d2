"""More text to train on: the target continues the prompts of its log, and logs its likeliest tokens.

A log of some minutes has too little text for a draft to learn from. Its prompts are scarce, but the target can continue
each one in more ways than the logged answer.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.config import CacheConfig, EngineConfig, ModelConfig, PositionLogConfig, SchedulerConfig
from engine.engine_core.core import EngineCore
from engine.engine_core.loading import load_engine
from engine.model.runner.model_runner import ModelRunner
from engine.position_log.shard import LoggedRequest, log_files, read_shard
from protos.errors import ConfigError
from protos.messages import GREEDY_BELOW, GenerateRequest, SamplingParams
from tuning.log_windows import Log

NUM_STREAMS = 64


@dataclass(frozen=True, slots=True)
class LoggedPrompt:
    """The prompt of a logged request, and its continuation by the target."""

    token_ids: tuple[int, ...]
    temperature: float
    repetition_penalty: float
    num_tokens: int


def write_rollouts(
    target: str, log: Log, folder: Path, minutes: float, on_progress: Callable[[float], None]
) -> Sequence[LoggedRequest]:
    """Let the target continue the training prompts for `minutes`, and return the texts.

    The texts of an earlier call in `folder` are returned at once; a killed call starts again.

    Raises:
        ConfigError: the target cannot be loaded here.
    """
    if not folder.is_dir():
        partial = folder.with_name(f"{folder.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(target, prompts_of(log), partial, minutes, on_progress)
        partial.rename(folder)
    return [request for file in log_files(folder) for request in read_shard(file) if len(request.positions)]


def prompts_of(log: Log) -> list[LoggedPrompt]:
    """Return the distinct prompts of training requests that no measuring request has."""
    measuring = {_prompt(request) for request in log.held_out.requests}
    found = {}
    for request in log.training.requests:
        token_ids = _prompt(request)
        if token_ids and token_ids not in measuring:
            is_greedy = request.temperature < GREEDY_BELOW
            # After greedy requests, 0.3 gives similar but not equal texts.
            temperature = 0.3 if is_greedy else request.temperature
            num_tokens = max(64, len(request.token_ids) - len(token_ids))
            found[token_ids, temperature] = LoggedPrompt(token_ids, temperature, request.repetition_penalty, num_tokens)
    return list(found.values())


def _prompt(request: LoggedRequest) -> tuple[int, ...]:
    return tuple(request.token_ids[: int(request.positions[0])].tolist())


def rollout_engine(target: str, folder: Path) -> tuple[EngineCore, ModelRunner]:
    """Return an engine that logs into `folder`, and its model. Raises ConfigError if the target cannot be loaded."""
    core = load_engine(
        EngineConfig(
            ModelConfig(target, num_threads=torch.get_num_threads()),
            CacheConfig(memory_bytes=1 << 30),  # each prompt of a small target is prefilled once and continued often
            SchedulerConfig(max_num_sequences=NUM_STREAMS),
            log=PositionLogConfig(str(folder), 1 << 30),
        )
    )
    runner = core.runner
    assert isinstance(runner, ModelRunner), "from_config loads one"
    return core, runner


def _write(
    target: str, prompts: Sequence[LoggedPrompt], folder: Path, minutes: float, on_progress: Callable[[float], None]
) -> None:
    core, runner = rollout_engine(target, folder)
    requests = _requests(_fitting(prompts, runner.max_model_len), runner.eos_token_ids)
    running: set[str] = set()
    began_s, seconds = time.monotonic(), 60.0 * minutes
    try:
        while (elapsed_s := time.monotonic() - began_s) < seconds:
            on_progress(elapsed_s / seconds)
            # Keep all streams busy until the time is over.
            while len(running) < NUM_STREAMS:
                request = next(requests)
                core.add(request)
                running.add(request.request_id)
            running -= {chunk.request_id for chunk in core.step() if chunk.finish_reason is not None}
        for request_id in running:
            core.abort(request_id)
    finally:
        core.close()


def _fitting(prompts: Sequence[LoggedPrompt], max_model_len: int) -> list[LoggedPrompt]:
    room = [max_model_len - len(prompt.token_ids) for prompt in prompts]
    return [
        replace(prompt, num_tokens=min(prompt.num_tokens, tokens))
        for prompt, tokens in zip(prompts, room, strict=True)
        if tokens >= 0.25 * max_model_len  # a longer prompt leaves no room
    ]


def _requests(prompts: Sequence[LoggedPrompt], end_ids: tuple[int, ...]) -> Iterator[GenerateRequest]:
    """Yield a request of each prompt in turn, again and again with other seeds."""
    if not prompts:
        raise ConfigError("the log has no prompt that the target could continue; give --rollouts 0")
    seed = 0
    while True:
        for prompt in prompts:
            seed += 1
            sampling = SamplingParams(
                seed,
                prompt.temperature,
                max_tokens=prompt.num_tokens,
                repetition_penalty=prompt.repetition_penalty,
                stop_token_ids=end_ids,
            )
            yield GenerateRequest(f"rollout-{seed}", prompt.token_ids, sampling, is_logged=True)
