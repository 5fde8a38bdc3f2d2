"""`outrider`, or `python -m cluster.cli`: the command line with all commands.

Each command is a function in a file of `commands/`; one line here adds it. Only the file of the given command is
loaded.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterable
from importlib import import_module

import typer

from cluster.cli import report_error
from cluster.local import private_files
from protos.errors import ConfigError, ServingError

_THIS_MACHINE = ("localhost", "127.0.0.1", "::1", "0.0.0.0")
_COMMANDS = {  # module in `commands/`, and function
    "serve": ("serve", "serve"),
    "chat": ("chat", "chat"),
    "bench": ("bench", "bench"),
    "audit": ("audit", "audit"),
    "check": ("check", "check"),
    "plan": ("plan", "plan"),
    "replay": ("replay", "replay"),
    "top": ("top", "top"),
    "try": ("try_drafts", "try_drafts"),
    "tune": ("tune", "tune"),
    "env": ("cache", "env"),
    "draft": ("draft", "draft"),
    "cache": ("cache", "cache"),
}


def _app(names: Iterable[str]) -> typer.Typer:
    """Load these commands and return the command line. The garbage collector skips their objects."""
    app = typer.Typer(
        name="outrider",
        help="Exact speculative decoding, served.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(lambda: None)  # without it typer takes a single command for the whole application
    gc.disable()  # it takes a third of the time of imports
    try:
        for name in names:
            module, attribute = _COMMANDS[name]
            command = getattr(import_module(f"cluster.cli.commands.{module}"), attribute)
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name)
            else:
                app.command(name)(command)
    finally:
        gc.freeze()
        gc.enable()
    return app


def main(arguments: list[str] | None = None) -> int:
    """Run a command and return the exit status. Its files may hold clients' texts: no other user reads them."""
    _open_streams()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes files and ends children, as Ctrl-C does
    _reach_this_machine()
    given = sys.argv[1:] if arguments is None else arguments
    try:
        _check_folder()
        with private_files():
            _app(given[:1] if given[:1] and given[0] in _COMMANDS else _COMMANDS)(args=given)
    except (ServingError, OSError) as error:  # OSError: of the system, such as a full disk below the output
        report_error(error)
        return 1
    except KeyboardInterrupt:  # while a command is loaded
        return 130
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def _open_streams() -> None:
    """Put the null device in place of closed standard streams: the next file would get the number, and the output."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 -- as long as the process


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
