"""`outrider`, or `python -m cluster.cli`: the command line with all commands.

Each command is a function in a file of `commands/`; one line here adds it.
"""

from __future__ import annotations

import os
import sys

import typer

from cluster.cli.commands.audit import audit
from cluster.cli.commands.bench import bench
from cluster.cli.commands.cache import cache, env
from cluster.cli.commands.chat import chat
from cluster.cli.commands.check import check
from cluster.cli.commands.draft import draft
from cluster.cli.commands.plan import plan
from cluster.cli.commands.replay import replay
from cluster.cli.commands.serve import serve
from cluster.cli.commands.top import top
from cluster.cli.commands.try_drafts import try_drafts
from cluster.cli.commands.tune import tune
from cluster.cli.console import report_error
from cluster.local.own_files import private_files
from protos.errors import ConfigError, ServingError

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1", "0.0.0.0")

app = typer.Typer(
    name="outrider",
    help="Exact speculative decoding, served.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(serve)
app.command()(chat)
app.command()(bench)
app.command()(audit)
app.command()(check)
app.command()(plan)
app.command()(replay)
app.command()(top)
app.command("try")(try_drafts)
app.command()(tune)
app.command()(env)
app.add_typer(draft, name="draft")
app.add_typer(cache, name="cache")


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return the exit status. Its files may hold clients' texts: no other user reads them."""
    _reach_this_machine()
    try:
        _check_folder()
        with private_files():
            app(args=arguments)
    except ServingError as error:
        report_error(error)
        return 1
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def _reach_this_machine() -> None:
    """Exclude this machine from the environment's proxy for all libraries: the proxy would call itself."""
    for name in ("no_proxy", "NO_PROXY"):
        hosts = os.environ.get(name, os.environ.get("NO_PROXY", "")).split(",")
        os.environ[name] = ",".join(dict.fromkeys([*filter(None, hosts), *_THIS_MACHINE]))


def _check_folder() -> None:
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the current folder is gone or cannot be entered ({error}); change to another folder"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
