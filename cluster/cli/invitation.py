"""The last words of a start: where to go next."""

from __future__ import annotations

import json
import shlex

from cluster.deploy_file import DeployFile


def invitation(file: DeployFile, logs: str | None = None) -> str:
    """Return the addresses, a first request, and the way to stop."""
    scheme = "http" if file.config.ingress.tls_certificate_file is None else "https"
    address = f"{scheme}://{file.http_host}:{file.http_port}"
    body = {"model": file.config.model_id, "prompt": "def fibonacci(n):", "max_tokens": 64, "temperature": 0}
    lines = [
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
