"""The report of an audit: as JSON, as one HTML page, and as curl commands that repeat its findings."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

import httpx

from cluster.cli.audit.answer import choices_of
from cluster.cli.audit.audit import ALPHA, Result
from cluster.cli.audit.evidence import POWER
from cluster.cli.audit.trial import Verdict
from protos.client_text import for_log
from protos.errors import ConfigError

_STYLE = (
    "body{font:15px/1.5 system-ui;max-width:64em;margin:2em auto;padding:0 1em}"
    "td,th{text-align:left;vertical-align:top;padding:.3em .8em .3em 0;border-top:1px solid #ccc}"
    "pre{white-space:pre-wrap;background:#f4f4f4;padding:.6em}.found{color:#b00020;font-weight:600}.holds{color:#12703a}"
)


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

    def number(self, verdict: Verdict) -> int:
        """Checks with a verdict."""
        return sum(check.verdict is verdict for check in self.checks)

    @property
    def summary(self) -> str:
        counts = ", ".join(f"{self.number(verdict)} {verdict}" for verdict in Verdict)
        return f"{counts}; {self.num_requests} requests, {self.minutes:.1f} minutes"


def write_json(report: Report, file: Path) -> None:
    """Write a report that `read_findings` reads."""
    _write(file, json.dumps(asdict(report), indent=1, ensure_ascii=True) + "\n", "--json")


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
    _write(file, page.encode(errors="backslashreplace").decode(), "--html")


def _row(check: Result) -> str:
    name, sentence = escape(f"{check.name}: {check.claim}"), escape(check.sentence)
    style = str(check.verdict).replace(" ", "-")
    row = (
        f"<tr><td>{name}<td class={style}>{check.verdict}<td>{check.num_draws}<td>{check.corrected_p:.2g}<td>{sentence}"
    )
    if check.finding is None:
        return row
    curl = curl_of(check.finding.request.url, check.finding.request.body)
    told = f"expected: {check.finding.expected}\nseen: {check.finding.seen}\n\n{curl}"
    return f"{row}<details><summary>repeat</summary><pre>{escape(told)}</pre></details>"


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


def _write(file: Path, text: str, option: str) -> None:
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {file} cannot be written: {error}") from None
