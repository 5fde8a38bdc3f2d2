"""`outrider tune`: trains a draft on its target's texts from a deployment's log or a file of requests."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from typer import Option

from actors.settings import NO_GAIN
from cluster.checkpoints import convert_gguf_models, resolve_model_path
from cluster.cli import console, numbers_in, report
from cluster.cli.child_process import in_child
from cluster.cli.deployment import BUNDLED, SetOptions, deployment_of, located
from cluster.cli.replay_traffic import Replay, TrafficRequest, read_traffic
from cluster.deploy_file import checked_deployment
from cluster.local.local_service import local_settings, running_service
from protos.errors import ConfigError
from router.tokenizer.tokenizer_files import load_tokenizer_files

if TYPE_CHECKING:
    from tuning.tune import TuneSettings

NEW_HEAD = "dspark"  # as --draft
_FULL_RATES = "0.0015,0.004"
_SHORT_RATE = "0.003"  # if there is no time to compare
_SHORT_MINUTES = 15.0
_LOW_RANK_RATES = "0.0005,0.002,0.006"
_NEW_RATE = "0.02"
_QUESTION = "\N{OBJECT REPLACEMENT CHARACTER}"  # in no template


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
    deployment["applications"][0]["args"]["tune"] = {"log": str(partial)}
    requests = [replace(each, body={"store": True, **each.body}) for each in requests]
    report(f"the target answers {len(requests)} requests")
    report(f"{in_child(_answer, deployment, requests)} tokens")
    partial.mkdir(exist_ok=True)  # requests with store: false are not logged
    partial.rename(folder)


def _answer(deployment: dict[str, Any], requests: list[TrafficRequest]) -> int:
    config = convert_gguf_models(checked_deployment(deployment, "outrider tune").config)
    settings = local_settings(config)
    os.environ.update(settings.target_share.thread_variables)  # before torch is loaded

    async def replay() -> int:
        async with running_service(config, settings) as service:
            run = await Replay(service).run(requests, num_streams=8, num_tokens=0, verify=None)
            await asyncio.to_thread(_wait_written, config.tune.folder)
            return run.num_tokens

    return asyncio.run(replay())


def _wait_written(folder: Path | None) -> None:
    """Wait for the next write of the log; it then has all finished requests."""
    ended_s, until_s = time.time(), time.monotonic() + 30.0  # several times the log's write period
    while time.monotonic() < until_s:
        files = [] if folder is None else list(folder.glob("*"))
        if any(file.stat().st_mtime > ended_s for file in files):
            return
        time.sleep(0.2)


_Target = Annotated[str, Option(metavar="TARGET", help="the model that wrote the log: a folder, a Hub id, or demo")]
_Draft = Annotated[
    str,
    Option(metavar="DRAFT", help=f"the draft to start from: a folder, or demo; {NEW_HEAD} for a new head of that kind"),
]
_Traffic = Annotated[
    Path | None, Option(metavar="log.jsonl", help="instead of --log: OpenAI requests; the target answers them first")
]
_OwnChats = Annotated[
    int, Option(min=0, help="instead of --log: the number of chats that the target, a chat model, writes alone first")
]
_Fresh = Annotated[int, Option(min=0, help="wait for this many new positions (--minutes at most), and train on them")]
_Rollouts = Annotated[
    float | None,
    Option(
        min=0,
        max=0.9,
        help="share of the minutes for the target to write more text after the log's prompts; default: 0.3, and 0 for "
        "targets above 2 GiB",
    ),
]
_Rates = Annotated[
    str | None,
    Option(
        help=f"learning rates to compare; default: {_SHORT_RATE}, from {_SHORT_MINUTES:.0f} minutes on {_FULL_RATES}, "
        f"for low-rank changes {_LOW_RANK_RATES}"
    ),
]


def tune(
    target: _Target,
    draft: _Draft,
    output: Annotated[Path, Option(help="folder of the new draft; it must not exist")],
    log: Annotated[Path | None, Option(help="the folder of deploy.yaml's tune.log")] = None,
    traffic: _Traffic = None,
    own_chats: _OwnChats = 0,
    minutes: Annotated[float, Option(min=0.01, help="minutes of training and measuring")] = 10.0,
    steps: Annotated[int | None, Option(min=1, help="limit of training steps, within the minutes")] = None,
    threads: Annotated[int, Option(min=1, help="CPU threads; the process gives way to all others")] = 1,
    fresh: _Fresh = 0,
    rollouts: _Rollouts = None,
    rank: Annotated[int, Option(min=0, help="rank of low-rank changes (LoRA); 0 trains all weights")] = 0,
    learning_rates: _Rates = None,
    seeds: Annotated[int, Option(min=1, help="seeds to compare per learning rate")] = 1,
    num_tokens: Annotated[int, Option(min=1, max=64, help="number of drafts (K) for the measurement")] = 4,
    max_requests: Annotated[int, Option(min=1, help="requests of --traffic to answer")] = 2000,
    max_tokens: Annotated[int, Option(min=1, help="longest answer to a request of --traffic")] = 128,
    settings: SetOptions = None,
) -> None:
    """Train a draft on the log of its deployment; write it if it is better, else exit with 3."""
    _check_source(log, traffic, own_chats, fresh)
    if settings and traffic is None:
        raise ConfigError(f"--set {settings[0]} is for the deployment that answers --traffic, which is not given")
    is_new = draft == NEW_HEAD and not Path(draft).exists()
    rates = _rates(learning_rates or (_NEW_RATE if is_new else _default_rates(rank, minutes)))
    target_path, draft_path = _folder(target, "target"), None if is_new else Path(_folder(draft, "draft"))
    os.environ["OMP_NUM_THREADS"] = str(threads)  # before torch is loaded
    # Imported here: it loads torch, which few commands need.
    from tuning.tune import TuneSettings, check_output, working_folder

    output = Path(os.path.expanduser(output)).absolute()
    check_output(output)
    if log is None:
        log = working_folder(output) / "log"
        if traffic is None:
            _write_chats(target_path, own_chats, log)
        else:
            deployment = deployment_of(target, draft="none", settings=tuple(settings or ()))
            log_traffic(deployment, read_traffic(traffic, max_requests, max_tokens), log)
    log = Path(os.path.expanduser(log)).absolute()
    limits = (minutes, rates, seeds, rank or None, num_tokens, steps, rollouts, fresh)
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    if not _train(TuneSettings(log, target_path, draft_path, output, *limits)):
        raise typer.Exit(NO_GAIN)
    report(f"written: {output}; try it with `outrider draft try {output}`, or set draft.path to this folder")


def _check_source(log: Path | None, traffic: Path | None, num_chats: int, num_fresh: int) -> None:
    """Raise ConfigError unless exactly one option names the texts to train on."""
    if [log is not None, traffic is not None, num_chats > 0].count(True) != 1:
        raise ConfigError(
            "give one of --log, the folder of a deployment's log, --traffic, a file of requests, and --own-chats"
        )
    if num_fresh and log is None:
        raise ConfigError(f"--fresh {num_fresh} waits for a deployment's log, which --traffic and --own-chats replace")


def _folder(model: str, part: str) -> str:
    if model in BUNDLED:
        path = BUNDLED[model][part].get("path")
        if path is None:
            raise ConfigError(f"--{part} {model}: it has no {part} model of its own; give a folder")
        return resolve_model_path(str(path))
    return located(model)


def _write_chats(target: str, num_chats: int, log: Path) -> None:
    """Let the target write chats alone, and log them."""
    from tuning.rollouts import write_own_chats  # loads torch

    report(f"the target writes {num_chats} chats")
    with _progress() as on_progress:
        write_own_chats(target, *_template(target), log, num_chats, partial(on_progress, "its chats"))


def _train(settings: TuneSettings) -> bool:
    """Return True if a training gives a better draft, which is written then."""
    from tuning.tune import tune as tune_draft  # loads torch

    try:
        with _progress() as on_progress:
            return tune_draft(settings, report, on_progress)
    except OSError as error:
        raise ConfigError(
            f"the tuning's files cannot be written: {error}; free disk space, and repeat the command: it continues"
        ) from error


def _template(target: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the tokens of the target's chat template before a question, and those between it and the answer."""
    files = load_tokenizer_files(target)
    if files.chat_template is None:
        raise ConfigError(f"--own-chats needs a chat model, and {target} has no chat template; give --traffic or --log")
    text = files.chat_template.render([{"role": "user", "content": _QUESTION}])
    before, _, after = text.partition(_QUESTION)
    first, second = (tuple(files.tokenizer.encode(part, add_special_tokens=False)) for part in (before, after))
    return first, second


def _default_rates(rank: int, minutes: float) -> str:
    if rank:
        return _LOW_RANK_RATES
    return _FULL_RATES if minutes >= _SHORT_MINUTES else _SHORT_RATE


def _rates(text: str) -> tuple[float, ...]:
    rates = numbers_in(text, "--learning-rates", float, f"write e.g. {_FULL_RATES}")
    if not all(0 < rate < float("inf") for rate in rates):
        raise ConfigError(f"--learning-rates {text!r} must be above 0; write e.g. {_FULL_RATES}")
    return tuple(dict.fromkeys(rates))


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """Yield a function that shows progress: a bar in a terminal, a line for each tenth elsewhere."""
    if not console.is_terminal:
        next_share = 0.0

        def show(name: str, share: float) -> None:
            nonlocal next_share
            if share >= next_share:
                report(f"{share:4.0%} {name}")
                next_share = share - share % 0.1 + 0.1  # ten lines in all

        yield show
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as bars:
        task = bars.add_task("training", total=1.0)
        yield lambda name, share: bars.update(task, description=name, completed=share)
