"""Make a log of verified positions from a log of requests: a child process answers the requests."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from cluster.checkpoints.gguf_models import convert_gguf_models
from cluster.cli.console import report
from cluster.cli.trial.replay_traffic import Replay
from cluster.cli.trial.traffic import TrafficRequest
from cluster.deploy_file import checked_deployment
from cluster.local.local_service import in_one_process, local_settings, running_service
from protos.errors import ConfigError

_NUM_STREAMS = 8
_WRITE_TIMEOUT_S = 30.0  # several times the log's write period
_POLL_S = 0.2


def log_traffic(deployment: dict[str, Any], requests: list[TrafficRequest], folder: Path) -> None:
    """Let a deployment answer requests and log all positions into `folder`, unless an earlier call has done so.

    Raises:
        ServingError: the target cannot run here, or refuses a request; the message names its line.
    """
    if folder.is_dir():
        report(f"{folder} has the answers of an earlier start")
        return
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    deployment["applications"][0]["args"]["tune"] = {"log": str(partial), "share": 1.0}
    report(f"the target answers {len(requests)} requests")
    try:
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
            num_tokens = pool.submit(_answer, deployment, requests).result()
    except BrokenProcessPool:
        raise ConfigError("the target's process ended; see its log above") from None
    report(f"{num_tokens} tokens")
    partial.mkdir(exist_ok=True)  # requests with store: false are not logged
    partial.rename(folder)


def _answer(deployment: dict[str, Any], requests: list[TrafficRequest]) -> int:
    config = convert_gguf_models(in_one_process(checked_deployment(deployment, "outrider tune").config))
    settings = local_settings(config)
    os.environ["OMP_NUM_THREADS"] = str(settings.target_share.num_threads)  # before torch is loaded

    async def replay() -> int:
        async with running_service(config, settings) as service:
            run = await Replay(service).run(requests, _NUM_STREAMS, 0, None)
            await asyncio.to_thread(_wait_written, config.tune.folder)
            return run.num_tokens

    return asyncio.run(replay())


def _wait_written(folder: Path | None) -> None:
    """Wait for the next write of the log; it then has all finished requests."""
    ended_s, until_s = time.time(), time.monotonic() + _WRITE_TIMEOUT_S
    while time.monotonic() < until_s:
        files = [] if folder is None else list(folder.glob("*"))
        if any(file.stat().st_mtime > ended_s for file in files):
            return
        time.sleep(_POLL_S)
