"""The end of a start's output: addresses and a first request."""

from __future__ import annotations

import json
import shlex
import sys

from cluster.cli.race import race
from cluster.deploy_file import LOOPBACK, DeployFile


def race_in_terminal(file: DeployFile) -> None:
    """Run the race if the output is a terminal and the server is on loopback without keys and TLS."""
    ingress, host = file.config.ingress, file.http_host
    if not sys.stdout.isatty() or ingress.api_keys_file or ingress.tls_certificate_file or host not in LOOPBACK:
        return
    race(f"{file.http_url}/v1", file.config.model_id)


def invitation(file: DeployFile, logs: str | None = None) -> str:
    """Return the addresses, a first request, and the way to stop."""
    address = file.http_url
    body = {"model": file.config.model_id, "prompt": "def fibonacci(n):", "max_tokens": 64, "temperature": 0}
    lines = [
        f"  page   {address}/",
        f"  HTTP   {address}/v1   (model {file.config.model_id})",
        *([f"  gRPC   127.0.0.1:{file.grpc_port}   (outrider.v1.Generation)"] if file.grpc_port else []),
        *([f"  logs   {logs}"] if logs else []),
        "",
        "try:",
        f"  curl {address}/v1/completions -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}",
        "",
        "stop with Ctrl-C",
    ]
    return "\n".join(lines)
