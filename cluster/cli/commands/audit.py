"""`outrider audit`: checks any OpenAI server from outside."""

from __future__ import annotations

import asyncio
import json
import shlex
import time
from collections import Counter
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from typer import Argument, Option

from cluster.cli import console, report, write_text
from cluster.cli.audit.audit import ALPHA, CHECKS, Check, Result, connect, run_audit
from cluster.cli.audit.client import RequestBudget, Server
from cluster.cli.audit.evidence import POWER
from cluster.cli.audit.trial import CheckVerdict
from cluster.cli.audit.wire import choices_of
from cluster.cli.server import API_KEY, URL, ApiKey, base_url, finite
from protos.client_text import for_log
from protos.errors import ConfigError

_STYLE = (
    "body{font:15px/1.5 system-ui;max-width:64em;margin:2em auto;padding:0 1em}"
    "td,th{text-align:left;vertical-align:top;padding:.3em .8em .3em 0;border-top:1px solid #ccc}"
    "pre{white-space:pre-wrap;background:#f4f4f4;padding:.6em}.found{color:#b00020;font-weight:600}.holds{color:#12703a}"
)


def audit(
    url: Annotated[str, Argument(help="base address of the server, with or without /v1", callback=base_url)] = URL,
    against: Annotated[
        str | None, Option(help="another server of the same model, without drafts for example", callback=base_url)
    ] = None,
    model: Annotated[str | None, Option(help="default: the first model of the server")] = None,
    minutes: Annotated[float, Option(min=0.01, callback=finite, help="longest time")] = 10.0,
    requests: Annotated[int, Option(min=1, help="most requests")] = 20_000,
    api_key: ApiKey = API_KEY,
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
    budget = RequestBudget(requests, time.monotonic() + 60 * minutes)
    done = asyncio.run(_audit(url, against, model, api_key, budget, checks))
    for note in done.notes:
        report(note)
    report(done.summary)
    if json_file is not None:
        write_json(done, json_file)
    if html is not None:
        write_html(done, html)
    if done.number(CheckVerdict.FOUND):
        raise typer.Exit(1)
    if not done.number(CheckVerdict.HOLDS):
        raise typer.Exit(2)  # no verdict


def _chosen(only: list[str] | None) -> list[Check]:
    names = [check.name for check in CHECKS]
    for name in only or ():
        if name not in names:
            raise ConfigError(f"--only {name!r} is not a check; the checks are {', '.join(names)}")
    return [check for check in CHECKS if not only or check.name in only]


async def _audit(
    url: str, against: str | None, model: str | None, key: str, budget: RequestBudget, checks: list[Check]
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


@dataclass(frozen=True, slots=True)
class Report:
    """An audit's results with its conditions."""

    url: str
    against: str | None
    model: str
    minutes: float
    num_requests: int
    notes: tuple[str, ...]
    checks: tuple[Result, ...]
    alpha: float = ALPHA
    power: float = POWER

    def number(self, verdict: CheckVerdict) -> int:
        """Checks with a verdict."""
        return sum(check.verdict is verdict for check in self.checks)

    @property
    def summary(self) -> str:
        counts = ", ".join(f"{self.number(verdict)} {verdict}" for verdict in CheckVerdict)
        return f"{counts}; {self.num_requests} requests, {self.minutes:.1f} minutes"


def write_json(report: Report, file: Path) -> None:
    """Write a report that `read_findings` reads."""
    write_text(file, json.dumps(asdict(report), indent=1, ensure_ascii=True) + "\n", "--json")


def write_html(report: Report, file: Path) -> None:
    """Write a page without further files."""
    against = f" against {report.against}" if report.against else ""
    notes = "".join(f"<p>{escape(note)}" for note in report.notes)
    page = (
        f"<!doctype html><meta charset=utf-8><title>Audit of {escape(report.url)}</title><style>{_STYLE}</style>"
        f"<h1>Audit of {escape(report.model)}</h1><p>{escape(report.url + against)}<p>{escape(report.summary)}{notes}"
        f"<p>A false alarm in any check has probability {report.alpha:g} at most. A check that holds had enough draws "
        f"to find its fault with probability {report.power:g}."
        "<table><tr><th>check<th>verdict<th>draws<th>corrected p<th>"
    )
    page += "".join(map(_row, report.checks)) + "</table>\n"
    write_text(file, page.encode(errors="backslashreplace").decode(), "--html")


def _row(check: Result) -> str:
    name, sentence = escape(f"{check.name}: {check.claim}"), escape(check.sentence)
    style = str(check.verdict).replace(" ", "-")
    row = (
        f"<tr><td>{name}<td class={style}>{check.verdict}<td>{check.num_draws}<td>{check.corrected_p:.2g}<td>{sentence}"
    )
    if check.finding is None:
        return row
    curl = curl_of(check.finding.request.url, check.finding.request.body)
    text = f"expected: {check.finding.expected}\nseen: {check.finding.seen}\n\n{curl}"
    return f"{row}<details><summary>repeat</summary><pre>{escape(text)}</pre></details>"


def curl_of(url: str, body: Any) -> str:
    """Return a command that sends a body; a key is read from the environment."""
    data = shlex.quote(json.dumps(body))
    headers = '-H "Authorization: Bearer $OPENAI_API_KEY" -H "Content-Type: application/json"'
    return f"curl -s {shlex.quote(url)} {headers} -d {data}"


def read_findings(file: Path) -> list[dict[str, Any]]:
    """Return the checks of a JSON report that have a finding.

    Raises:
        ConfigError: the file is not a report.
    """
    try:
        checks = json.loads(file.read_text(encoding="utf-8"))["checks"]
        found = [check for check in checks if check["finding"] is not None]
        for check in found:
            (check["name"], check["finding"]["request"]["url"].encode, check["finding"]["request"]["body"].keys)
            (check["finding"]["expected"], check["finding"]["seen"])
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f"--replay {file} is not a report of --json ({type(error).__name__}: {error})") from None
    return found


def replayed(finding: dict[str, Any], base_url: str, key: str) -> str:
    """Send a finding's request once more; return the command, the expectation, and both answers.

    A report may be a stranger's: the key goes to the server at `base_url` alone.
    """
    url, body = finding["request"]["url"], finding["request"]["body"]
    headers = {"Authorization": f"Bearer {key}"} if url.startswith(f"{base_url}/") else {}
    try:
        response = httpx.post(url, json=body, headers=headers, timeout=120.0)
        now = _now(response)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        now = f"no answer ({error or type(error).__name__})"
    return f"{curl_of(url, body)}\nexpected: {finding['expected']}\nseen: {finding['seen']}\nnow: {now}"


def _now(response: httpx.Response) -> str:
    choices = choices_of(response)
    if not choices:
        return f"status {response.status_code}: {for_log(response.text)}"
    texts = Counter(choice.text or str(choice.calls) for choice in choices)
    reasons = Counter(choice.finish_reason for choice in choices)
    shown = ", ".join(f"{text!r} {count}" for text, count in texts.most_common(10))
    return f"{shown} ({', '.join(f'{reason} {count}' for reason, count in reasons.items())})"
