"""The command line: `outrider serve`, which `make serve` runs, and `outrider check`, which starts nothing."""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

from cluster.config import DeployConfig
from cluster.deploy_file import DeployFile, read_deploy_file
from cluster.local_cluster import AppStatus, LocalCluster
from cluster.model_files import check_models
from cluster.model_path import resolve_model_path
from cluster.preflight import check_memory, check_ports
from protos.errors import ConfigError, ServingError
from router.api_keys import ApiKeys

_REPORT_PERIOD_S = 5.0


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return the exit status."""
    parser = argparse.ArgumentParser(prog="outrider", description="Exact speculative LLM serving on Ray.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("serve", "serve a deployment on this machine until Ctrl-C"), ("check", "check a deployment")):
        commands.add_parser(name, help=text).add_argument("deploy_file", type=Path, metavar="deploy.yaml")
    commands.choices["check"].add_argument(
        "--quality", type=Path, nargs="+", metavar="TEXT", help="also measure the target's perplexity on these files"
    )
    options = parser.parse_args(arguments)
    try:
        file = read_deploy_file(options.deploy_file)
        check_models(file.config)
        ApiKeys.from_file(file.config.ingress.api_keys_file)
        check_memory(file.config)
        if options.command == "serve":
            check_ports(file)
            _serve(file)
        else:
            print(f"{options.deploy_file} is fine: model {file.config.model_id!r}")
            if options.quality:
                _report_quality(file.config, options.quality)
    except ServingError as error:
        print(f"\nerror: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _report_quality(config: DeployConfig, files: list[Path]) -> None:
    # Not at the top: it loads torch, which no other command does in this process.
    from engine.model.runner.perplexity import measure_quality

    model = replace(config.to_engine().model, path=resolve_model_path(config.target.path))
    try:
        quality = measure_quality(model, [file.read_text(encoding="utf-8") for file in files])
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--quality cannot read its text: {error}; give files of UTF-8 text") from error
    print(f"perplexity {quality.perplexity:.3f} on {quality.num_tokens} tokens, quantization {model.quantization}")
    if quality.full_perplexity is not None:
        excess = quality.perplexity / quality.full_perplexity - 1
        print(f"           {quality.full_perplexity:.3f} without quantization: {excess:+.2%}")


class _Interrupt:
    """The signals SIGINT and SIGTERM: the first asks to stop, a second one insists."""

    def __init__(self) -> None:
        self.is_set = threading.Event()
        self._is_breaking = False
        self.listen()

    def listen(self) -> None:
        """Catch the signals from now on. Called again after Ray has started, which takes SIGTERM for itself."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.is_set.is_set():
            raise KeyboardInterrupt
        self.is_set.set()
        if self._is_breaking:
            raise _InterruptedError

    @contextmanager
    def breaking(self) -> Iterator[None]:
        """Let the first signal end the block at once, by `_InterruptedError`."""
        self._is_breaking = True
        try:
            if self.is_set.is_set():
                raise _InterruptedError
            yield
        finally:
            self._is_breaking = False


class _InterruptedError(Exception):
    """Ctrl-C while the deployment was starting."""


def _serve(file: DeployFile) -> None:
    interrupt = _Interrupt()
    cluster = LocalCluster()
    began_s = time.monotonic()
    try:
        _report("[2/4] starting a Ray cluster on this machine")
        cluster.start()
        interrupt.listen()
        _report(f"[3/4] loading weights: target {file.config.target.path}, draft {_draft_name(file)}")
        with interrupt.breaking():  # Ctrl-C reaches Ray's dashboard too, which then may never answer
            cluster.deploy(file)
        cluster.wait_running(_Progress(interrupt, began_s))
        _report(f"[4/4] ready after {time.monotonic() - began_s:.0f} s\n\n{_invitation(file)}")
        interrupt.is_set.wait()
        _report("\nstopping: running requests may finish; Ctrl-C again to stop at once")
    except _InterruptedError:
        _report("\nstopping")
    finally:
        _stop(cluster)


def _stop(cluster: LocalCluster) -> None:
    try:
        cluster.stop()
    except KeyboardInterrupt:
        cluster.kill()


class _Progress:
    """A report of the wait every few seconds, which ends with the first signal."""

    def __init__(self, interrupt: _Interrupt, began_s: float) -> None:
        self._interrupt = interrupt
        self._began_s = began_s
        self._reported_s = began_s

    def __call__(self, status: AppStatus) -> None:
        if self._interrupt.is_set.is_set():
            raise _InterruptedError
        now_s = time.monotonic()
        if now_s - self._reported_s < _REPORT_PERIOD_S:
            return
        self._reported_s = now_s
        waiting = " and ".join(status.waiting) or "the application"
        _report(f"      {now_s - self._began_s:3.0f} s, waiting for {waiting}")


def _draft_name(file: DeployFile) -> str:
    return file.config.draft.path or file.config.draft.kind


def _invitation(file: DeployFile) -> str:
    address = f"http://{file.http_host}:{file.http_port}"
    body = {"model": file.config.model_id, "prompt": "def fibonacci(n):", "max_tokens": 64, "temperature": 0}
    lines = [
        f"  HTTP   {address}/v1   (model {file.config.model_id})",
        *([f"  gRPC   127.0.0.1:{file.grpc_port}   (outrider.v1.Generation)"] if file.grpc_port else []),
        "  logs   /tmp/ray/session_latest/logs",
        "",
        "try:",
        f"  curl {address}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}",
        "",
        "stop with Ctrl-C",
    ]
    return "\n".join(lines)


def _report(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
