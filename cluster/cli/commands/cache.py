"""`outrider cache` lists and clears the files that this machine keeps of models; `outrider env` prints variables."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from cluster.checkpoints import converted_root
from cluster.cli import report
from cluster.local import PRIVATE, private_root
from cluster.local.serve_environment import cluster_variables
from cluster.topology import order_devices
from engine.model.checkpoint.weight_files import digests_root
from engine.model.linear.cache_folder import BOUND, CacheEntry, max_bytes, packed_entries, packed_root, remove_entry
from protos.errors import ConfigError


def env(
    gpus_per_pair: Annotated[
        int | None, Option(min=1, help="order this node's GPUs so that NVLink connects each pair's GPUs")
    ] = None,
) -> None:
    """Print the variables to set before `ray start` on every node: `eval "$(outrider env)"`."""
    private = {"RAY_TMPDIR": os.environ.get("RAY_TMPDIR") or private_root()}
    for name, value in {**cluster_variables(), **private, **order_devices(gpus_per_pair)}.items():
        print(f"export {name}={shlex.quote(value)}")
    print(f"umask {PRIVATE:03o}")


cache = typer.Typer(
    help="List or clear the files of models that this machine keeps on disk.", invoke_without_command=True
)


@cache.callback()
def list_entries(context: typer.Context) -> None:
    """List packed weights, converted GGUF files and the digests of checkpoints: model, kind, size, last use."""
    if context.invoked_subcommand is not None:
        return
    entries = list(_entries())
    for entry in entries:
        used = datetime.fromtimestamp(entry.used_s, UTC).astimezone()
        report(f"{entry.model}  {entry.quantization}  {_size(entry.num_bytes)}  used {used:%Y-%m-%d %H:%M}")
    bound = f"packed weights take at most {_size(max_bytes())} ({BOUND})"
    report(f"{len(entries)} entries, {_size(sum(entry.num_bytes for entry in entries))}; {bound}, in {packed_root()}")


@cache.command()
def clear(
    name: Annotated[str | None, Argument(metavar="[NAME]", help="a model of the list; all of them if left out")] = None,
) -> None:
    """Remove entries; a running server keeps its mapped weights."""
    entries = [entry for entry in _entries() if name in (None, entry.model)]
    if name is not None and not entries:
        models = ", ".join(sorted({entry.model for entry in _entries()})) or "none"
        raise ConfigError(f"the cache has no entry of {name!r}; it has {models}")
    for entry in entries:
        remove_entry(entry)
    left = [entry for entry in entries if entry.folder.exists()]
    gone = [entry for entry in entries if entry not in left]
    report(f"removed {len(gone)} entries, {_size(sum(entry.num_bytes for entry in gone))}")
    if left:
        raise ConfigError(f"{len(left)} entries cannot be removed by this user, among them {left[0].folder}")


def _entries() -> Iterator[CacheEntry]:
    yield from packed_entries()
    root = converted_root()
    for folder in sorted(root.iterdir()) if root.is_dir() else ():
        if (folder / "config.json").is_file():
            yield _entry(folder, folder.name, "converted GGUF", lambda file: file.st_atime)
    if any(_files_of(digests_root())):
        yield _entry(digests_root(), "digests", "of checkpoints", lambda file: file.st_mtime)


def _entry(folder: Path, name: str, kind: str, used_s: Callable[[os.stat_result], float]) -> CacheEntry:
    files = [file.stat() for file in _files_of(folder)]
    return CacheEntry(folder, name, kind, sum(file.st_size for file in files), max(map(used_s, files)))


def _files_of(folder: Path) -> Iterator[Path]:
    return folder.iterdir() if folder.is_dir() else iter(())


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
