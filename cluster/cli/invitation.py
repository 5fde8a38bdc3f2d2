"""The end of a start's output: addresses, a first request, and a race of drafts off and on."""

from __future__ import annotations

import json
import shlex
import sys
import time
from typing import Any

from openai import OpenAI, OpenAIError
from rich.console import Console

from cluster.cli.server import API_KEY
from cluster.deploy_file import LOOPBACK, DeployFile

_PROMPT = "def main():\n    parser = argparse.ArgumentParser("


def race(url: str, model: str) -> None:
    """Print both texts as they arrive, and the verdict; without a race, print the reason in one line."""
    console = Console(highlight=False)
    limit_s = 30.0  # of the whole race; a slower machine gets no race
    deadline_s = time.monotonic() + limit_s
    try:
        with OpenAI(base_url=url, api_key=API_KEY, timeout=limit_s, max_retries=0) as client:
            for enabled in (False, True):  # a warm-up of both ways, which also caches the prompt
                _run(client, model, 8, enabled, deadline_s)
            results = []
            for enabled in (False, True):
                console.print(f"draft {'on ' if enabled else 'off'} ", end="", style="bold")
                ids, seconds = _run(client, model, num_tokens=96, enabled=enabled, deadline_s=deadline_s)
                results.append((ids, seconds))
                console.print(f"{len(ids) / seconds:7.1f} tokens/s  ({len(ids)} tokens in {seconds:.2f} s)")
    except (OpenAIError, TimeoutError) as error:
        console.print(f"no race: {error}", style="dim")
        return
    (off, off_s), (on, on_s) = results
    if off != on:
        console.print("the texts differ: rejection and block verification keep the distribution, not the text")
        return
    console.print(f"identical tokens, {len(on) / on_s / (len(off) / off_s):.2f} times the speed", style="bold green")


def _run(client: OpenAI, model: str, num_tokens: int, enabled: bool, deadline_s: float) -> tuple[list[int], float]:
    """Return the token ids, and the seconds until the last of them."""
    extra: dict[str, Any] = {"return_token_ids": True, "speculation": {"enabled": enabled}}
    ids: list[int] = []
    began_s = time.monotonic()
    with client.completions.create(
        model=model, prompt=_PROMPT, max_tokens=num_tokens, temperature=0, seed=7, stream=True, extra_body=extra
    ) as stream:
        for event in stream:
            if time.monotonic() > deadline_s:
                raise TimeoutError("it would take more than 30 s here")
            for choice in event.choices:
                ids += (choice.model_extra or {}).get("token_ids") or ()
    return ids, time.monotonic() - began_s


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
