"""`outrider draft`: the drafts of a running server, shown and replaced while it serves."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from cluster.cli import console
from cluster.cli.server import (
    API_KEY,
    NOT_UNDERSTOOD,
    URL,
    AnswerError,
    ApiKey,
    ServerUrl,
    finite,
    request_page,
    understood,
)
from protos.errors import ConfigError
from protos.served_model import ANSWER_S, CHECK_TIMEOUT_S, RETURN_S, TryDraft

draft = typer.Typer(help="Show and replace the drafts of a running server.", no_args_is_help=True)

_CHECK_AND_RETURN_S = CHECK_TIMEOUT_S + RETURN_S + 3 * ANSWER_S  # without the wait for the new draft

_TRIAL = TryDraft("")

Method = Annotated[str, Option(help="method name of the draft, if there are several; default: the deployment's own")]


@draft.command()
def show(url: ServerUrl = URL, api_key: ApiKey = API_KEY) -> None:
    """Show the draft of every pair."""
    _print(_call(url, api_key, "/admin/drafts", None, timeout_s=30.0))


@draft.command()
def swap(
    path: Annotated[Path, Argument(help="folder of the new draft, at this path on every node with a pair")],
    url: ServerUrl = URL,
    api_key: ApiKey = API_KEY,
    wait_s: Annotated[float, Option(min=1.0, max=3600.0, help="go back to the old draft after this time")] = 120.0,
    method: Method = "",
) -> None:
    """Replace the draft of every pair; running streams continue."""
    body = {"path": str(path.expanduser().absolute()), "wait_s": wait_s, **_named(method)}
    _print(_call(url, api_key, "/admin/drafts/swap", body, wait_s + _CHECK_AND_RETURN_S))


@draft.command("try")
def canary(
    path: Annotated[Path, Argument(help="folder of the new draft, at this path on every node with a pair")],
    url: ServerUrl = URL,
    api_key: ApiKey = API_KEY,
    wait_s: Annotated[float, Option(min=1.0, max=3600.0, help="longest wait until a draft serves")] = _TRIAL.wait_s,
    block_s: Annotated[float, Option(min=0.1, max=3600.0, help="seconds of decoding with one draft")] = _TRIAL.block_s,
    max_pairs: Annotated[
        int, Option(min=4, max=1000, help="pairs of blocks before the old draft stays")
    ] = _TRIAL.max_pairs,
    min_gain: Annotated[
        float, Option(max=10.0, callback=finite, help="smallest gain worth keeping; 0.05 is 5% more goodput")
    ] = _TRIAL.min_gain,
    false_keep: Annotated[
        float, Option(max=0.5, callback=finite, help="chance of keeping a draft that is not faster")
    ] = _TRIAL.false_keep,
    false_rollback: Annotated[
        float, Option(max=0.5, callback=finite, help="chance of dropping a draft that gains min-gain")
    ] = _TRIAL.false_rollback,
    deadline_s: Annotated[
        float, Option(min=1.0, max=604_800.0, help="time limit of the whole trial")
    ] = _TRIAL.deadline_s,
    method: Method = "",
) -> None:
    """Try a draft in turns with the present one, and keep the faster; `show` reports progress."""
    body = {
        "path": str(path.expanduser().absolute()),
        "wait_s": wait_s,
        "block_s": block_s,
        "deadline_s": deadline_s,
        "min_gain": min_gain,
        "false_keep": false_keep,
        "false_rollback": false_rollback,
        "max_pairs": max_pairs,
        **_named(method),
    }
    _print(_call(url, api_key, "/admin/drafts/canary", body, _CHECK_AND_RETURN_S))


@draft.command()
def stop(url: ServerUrl = URL, api_key: ApiKey = API_KEY) -> None:
    """Stop a trial, and go back to the old draft."""
    _print(_call(url, api_key, "/admin/drafts/canary/stop", {}, _CHECK_AND_RETURN_S))


def _named(method: str) -> dict[str, str]:
    return {"method": method} if method else {}


def _call(url: str, api_key: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> list[list[str]]:
    """Return a row for each draft in the server's reply. Raises ConfigError with the reason of a refusal."""
    try:
        with understood():
            response = request_page(url, api_key, path, body, timeout_s)
            if response.is_success:
                return [_row(each) for each in response.json()["drafts"]]
    except AnswerError as error:
        raise ConfigError(f"cannot get the drafts from {url}: {error}; start a server, or give --url") from None
    raise ConfigError(_reason(response))


def _reason(response: httpx.Response) -> str:
    with suppress(*NOT_UNDERSTOOD):
        return str(response.json()["error"]["message"])
    return f"the server returned {response.status_code} {response.reason_phrase}"


def _print(rows: list[list[str]]) -> None:
    table = Table()
    for name in ("pair", "method", "draft", "digest", "since", "trial"):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))  # other cells would be parsed as markup
    console.print(table)


def _row(draft: dict[str, Any]) -> list[str]:
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(draft["since"]))
    path = draft["path"] if draft["is_deployed"] else f"{draft['path']} (deploy.yaml has another)"
    row = [draft["replica"], draft["method"], path, draft["digest"], since, _trial(draft)]
    return [str(cell).encode(errors="backslashreplace").decode() for cell in row]


def _trial(draft: dict[str, Any]) -> str:
    """Return a trial in words: its state, the measured gain, and its bounds."""
    canary = draft.get("canary")
    if canary is None:
        return str(draft.get("tuning", "none"))
    text = f"{canary['name']} {canary['outcome'].replace('_', ' ')}, {canary['num_pairs']} pairs of blocks"
    if canary["gain"] is not None:
        text += f", gain {canary['gain']:+.1%}"
    if canary["low"] is not None:
        text += f" ({canary['low']:+.1%} to {canary['high']:+.1%})"
    return f"{text}: {canary['reason']}" if canary["reason"] else text
