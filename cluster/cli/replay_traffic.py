"""Measure one draft with a log of requests, against plain decoding, on a server without sockets in this process."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from actors.settings import PairSettings
from cluster.checkpoints import convert_gguf_models
from cluster.cli.server import ClassFigures, Reading, drafts_between, figures_between, read_metrics
from cluster.config import DeployConfig
from cluster.deploy_file import checked_deployment
from cluster.local.local_service import local_settings, running_service
from protos.errors import ConfigError, RequestError
from router.api_keys import ApiKeys
from router.generation.generation_service import GenerationService
from router.openai.api import build_app

_DROPPED = ("model", "stream", "stream_options", "speculation")  # the trial sets these


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """A request of a log: its line, its path, and its body without the fields that the trial sets."""

    line: int
    path: str
    body: dict[str, Any]


def read_traffic(file: Path, max_requests: int, max_tokens: int) -> list[TrafficRequest]:
    """Return the first requests of a log, with answers of at most `max_tokens`.

    A line is a request's body, or an object with a `body`, as in OpenAI's batch files. Empty lines are skipped.

    Raises:
        ConfigError: the file is unreadable or empty, or a line is not a request; the message names the line.
    """
    requests: list[TrafficRequest] = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, text in enumerate(lines, start=1):
                if text.strip() and len(requests) < max_requests:
                    requests.append(_request(file, number, text, max_tokens))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; give a file of JSON lines in UTF-8") from error
    if not requests:
        raise ConfigError(f"{file} has no request; write one OpenAI request per line")
    return requests


def _request(file: Path, number: int, text: str, max_tokens: int) -> TrafficRequest:
    try:
        entry = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{file}, line {number} is not JSON: {error}; write one OpenAI request per line") from error
    body = entry.get("body", entry) if isinstance(entry, dict) else None
    if not isinstance(body, dict) or ("messages" in body) == ("prompt" in body):
        raise ConfigError(f"{file}, line {number} is not a request: it needs either `messages` or `prompt`")
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    body = {key: value for key, value in body.items() if key not in _DROPPED}
    limit = body.pop("max_completion_tokens", None) or body.get("max_tokens") or max_tokens
    if not isinstance(limit, int):
        raise ConfigError(f"{file}, line {number}: max_tokens is {limit!r}, which is not a whole number")
    return TrafficRequest(number, path, {**body, "max_tokens": min(limit, max_tokens)})


@dataclass(frozen=True, slots=True)
class DraftTrial:
    """A deployment to measure: its draft's name, the lengths and verification modes to compare, and the traffic."""

    draft: str
    deployment: dict[str, Any]
    requests: tuple[TrafficRequest, ...]
    lengths: tuple[int, ...]
    verify: tuple[str, ...]
    streams: tuple[int, ...]
    num_rounds: int


@dataclass(frozen=True, slots=True)
class TrialFigures:
    """One draft, K and verification at a number of streams: tokens per second, and the speed-up over plain decoding.

    Tokens and drafts are means per pass of a sequence, including passes without drafts. Prompt and output tokens are
    means per request. `classes` has the acceptance by class and position.
    """

    draft: str
    num_tokens: int
    verify: str
    num_streams: int
    tokens_per_s: float
    speedup: float
    tokens_per_pass: float
    drafts_per_pass: float
    prompt_tokens: int
    output_tokens: int
    classes: tuple[ClassFigures, ...]

    @property
    def is_noisy(self) -> bool:
        """True if the speed-up exceeds the possible gain of drafts: another program has slowed plain decoding."""
        return self.speedup > self.tokens_per_pass

    @property
    def sure_speedup(self) -> float:
        """The speed-up, bounded by tokens per pass: no pass with drafts is faster than a plain one."""
        return min(self.speedup, self.tokens_per_pass)


@dataclass(frozen=True, slots=True)
class TrafficRun:
    """One replay of the traffic: generated tokens, their time, and the metrics before and after."""

    num_requests: int
    num_prompt_tokens: int
    num_tokens: int
    before: Reading
    after: Reading
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second."""
        return self.num_tokens / self.seconds


def run_trial(trial: DraftTrial) -> list[TrialFigures]:
    """Load the models and replay the traffic in every way, in interleaved rounds; runs in a child process.

    Raises:
        ServingError: the deployment cannot run here.
        RequestError: a request is refused; the message names its line.
    """
    config = convert_gguf_models(checked_deployment(trial.deployment, trial.draft).config)
    settings = local_settings(config)
    os.environ.update(settings.target_share.thread_variables)  # before torch is loaded
    return asyncio.run(_measure(trial, config, settings))


async def _measure(trial: DraftTrial, config: DeployConfig, settings: PairSettings) -> list[TrialFigures]:
    async with running_service(config, settings) as service:
        replay = Replay(service)
        await replay.run(
            trial.requests, 1, 0, None
        )  # a warm-up of memory and kernels, which also finds refused requests
        measured: list[TrialFigures] = []
        for num_streams in trial.streams:
            ways = [(0, None), *((length, verify) for verify in trial.verify for length in trial.lengths)]
            rounds = [
                [await replay.run(trial.requests, num_streams, *way) for way in ways] for _ in range(trial.num_rounds)
            ]
            for index, (length, verify) in enumerate(ways[1:], start=1):
                runs = [each[index] for each in rounds]
                speedup = median(each[index].tokens_per_s / each[0].tokens_per_s for each in rounds)
                measured.append(_measured(trial.draft, length, str(verify), num_streams, runs, speedup))
        return measured


def _measured(
    draft: str, length: int, verify: str, num_streams: int, runs: Sequence[TrafficRun], speedup: float
) -> TrialFigures:
    last = runs[-1]
    num_drafts, num_accepted = drafts_between(last.before, last.after)
    num_passes = last.num_tokens - num_accepted
    return TrialFigures(
        draft=draft,
        num_tokens=length,
        verify=verify,
        num_streams=num_streams,
        tokens_per_s=median(run.tokens_per_s for run in runs),
        speedup=speedup,
        tokens_per_pass=last.num_tokens / num_passes,
        drafts_per_pass=num_drafts / num_passes,
        prompt_tokens=round(last.num_prompt_tokens / last.num_requests),
        output_tokens=round(last.num_tokens / last.num_requests),
        classes=tuple(
            each
            for each in figures_between(last.before, last.after, last.seconds).classes
            if any(share is not None for share in each.acceptance)
        ),
    )


class Replay:
    """Sends requests to the ASGI application, without a socket."""

    def __init__(self, service: GenerationService) -> None:
        transport = httpx.ASGITransport(app=build_app(service, ApiKeys(None, is_open_admin=True)))
        self._client = httpx.AsyncClient(transport=transport, base_url="http://trial")
        self._num_runs = 0

    async def run(
        self, requests: Sequence[TrafficRequest], num_streams: int, num_tokens: int, verify: str | None
    ) -> TrafficRun:
        """Replay all requests, `num_streams` at a time, with `num_tokens` drafts per pass (0 for none).

        A salt per run keeps the cached prompts and texts of one run out of the next.
        """
        self._num_runs += 1
        speculation = {"enabled": False} if num_tokens == 0 else {"num_tokens": num_tokens, "verify": verify}
        free = asyncio.Semaphore(num_streams)
        before = await self._metrics()
        began_s = time.perf_counter()
        usages = await asyncio.gather(*(self._send(request, speculation, free) for request in requests))
        seconds = time.perf_counter() - began_s
        num_prompt_tokens = sum(int(usage["prompt_tokens"]) for usage in usages)
        num_tokens = sum(int(usage["completion_tokens"]) for usage in usages)
        return TrafficRun(len(usages), num_prompt_tokens, num_tokens, before, await self._metrics(), seconds)

    async def _send(
        self, request: TrafficRequest, speculation: dict[str, Any], free: asyncio.Semaphore
    ) -> dict[str, Any]:
        salt = f"trial {self._num_runs} {request.body.get('cache_salt', '')}"
        body = {**request.body, "speculation": speculation, "cache_salt": salt}
        async with free, asyncio.timeout(600.0):
            response = await self._client.post(request.path, json=body)
        answer = response.json()
        if response.status_code != 200:
            message = answer.get("error", {}).get("message", response.text)
            raise RequestError(f"line {request.line} of the traffic is refused: {message}")
        usage: dict[str, Any] = answer["usage"]
        return usage

    async def _metrics(self) -> Reading:
        return read_metrics((await self._client.get("/metrics")).text)
