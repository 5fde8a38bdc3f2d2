"""`outrider audit`: checks any OpenAI server from outside."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from cluster.cli.audit.audit import CHECKS, Check, Result, connect, run_audit
from cluster.cli.audit.client import Budget, Server
from cluster.cli.audit.report import Report, read_findings, replayed, write_html, write_json
from cluster.cli.audit.trial import Verdict
from cluster.cli.console import console, report
from cluster.cli.server import API_KEY, URL, base_url, finite
from protos.client_text import for_log
from protos.errors import ConfigError


def audit(
    url: Annotated[str, Argument(help="base address of the server, with or without /v1", callback=base_url)] = URL,
    against: Annotated[
        str | None, Option(help="another server of the same model, without drafts for example", callback=base_url)
    ] = None,
    model: Annotated[str | None, Option(help="default: the first model of the server")] = None,
    minutes: Annotated[float, Option(min=0.01, callback=finite, help="longest time")] = 10.0,
    requests: Annotated[int, Option(min=1, help="most requests")] = 20_000,
    api_key: Annotated[str, Option("--key", "--api-key", envvar="OPENAI_API_KEY", help="key of the server")] = API_KEY,
    only: Annotated[list[str] | None, Option(help="a check's name; may be repeated")] = None,
    json_file: Annotated[Path | None, Option("--json", help="write the report to this file")] = None,
    html: Annotated[Path | None, Option(help="write a page to this file")] = None,
    replay: Annotated[
        Path | None,
        Option(help="repeat the findings of a JSON report, those at URL with the key, and print their commands"),
    ] = None,
) -> None:
    """Audit an OpenAI server: sampling, drafts, cache, formats, counts and speed, against its own logprobs.

    Exits with 1 if a fault is found, with 2 if no check reaches a verdict.
    """
    if replay is not None:
        for check in read_findings(replay):
            report(f"{check['name']}: {check['claim']}\n{replayed(check['finding'], url, api_key)}\n")
        return
    for file in filter(None, (json_file, html)):
        if file.is_dir() or not file.parent.is_dir():
            raise ConfigError(f"{file} cannot be written; give a file in an existing folder")
    checks = _chosen(only)
    budget = Budget(requests, time.monotonic() + 60 * minutes)
    done = asyncio.run(_audit(url, against, model, api_key, budget, checks))
    if json_file is not None:
        write_json(done, json_file)
    if html is not None:
        write_html(done, html)
    for note in done.notes:
        report(note)
    report(done.summary)
    if done.number(Verdict.FOUND):
        raise typer.Exit(1)
    if not done.number(Verdict.HOLDS):
        raise typer.Exit(2)  # no verdict


def _chosen(only: list[str] | None) -> list[Check]:
    names = [check.name for check in CHECKS]
    for name in only or ():
        if name not in names:
            raise ConfigError(f"--only {name!r} is not a check; the checks are {', '.join(names)}")
    return [check for check in CHECKS if not only or check.name in only]


async def _audit(
    url: str, against: str | None, model: str | None, key: str, budget: Budget, checks: list[Check]
) -> Report:
    server = await connect(url, key, model, budget)
    other = await connect(against, key, None, budget) if against else None
    began_s = time.monotonic()
    with console.status("") as status:

        def progress(name: str, result: Result | None) -> None:
            spent = f"{budget.num_requests} of {budget.max_requests} requests, {time.monotonic() - began_s:.0f} s"
            status.update(f"{name} ({spent})")
            if result is not None:
                p = f", p = {result.p_value:.1g}" if result.num_draws else ""
                report(f"{result.verdict:12} {name}: {result.sentence} ({result.num_draws} draws{p})")

        results = await run_audit(server, other, checks, progress)
    for each in filter(None, (server, other)):
        await each.http.aclose()
    return Report(
        url=url,
        against=against,
        model=server.model,
        minutes=round((time.monotonic() - began_s) / 60, 2),
        num_requests=budget.num_requests,
        notes=tuple(note for each in filter(None, (server, other)) for note in _notes(each)),
        checks=tuple(results),
    )


def _notes(server: Server) -> list[str]:
    """Return sentences on the server that are no verdicts."""
    notes = []
    if others := server.names - {server.model}:
        notes.append(f"answers name the model {for_log(', '.join(sorted(others)))}, not {server.model}")
    if missing := [name for name in ("top_k", "min_p", "repetition_penalty") if name not in server.neutral]:
        notes.append(f"the server refuses {', '.join(missing)}")
    return notes
