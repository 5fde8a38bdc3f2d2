"""The processes of one served application, by kind, on a machine that may run others."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "OUTRIDER_CHAOS"
KINDS = {
    "target": "ray::TargetActor",
    "draft": "ray::DraftActor",
    "pair shell": "ray::ServeReplica:outrider:Pair",
    "prefill replica": "ray::ServeReplica:outrider:Prefill",
    "ingress": "ray::ServeReplica:outrider:Ingress",
    "index": "ray::IndexActor",
    "standby proxy": "ray::ProxyActor",
    "HAProxy's manager": "ray::HAProxyManager",
    "HAProxy": "haproxy",
    "Serve controller": "ray::ServeController",
    "GCS": "gcs_server",
    "raylet": "raylet",
}


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """The use of all processes of an application together; actors are the processes that Ray has titled."""

    num_bytes: int
    num_processes: int
    num_actors: int
    num_threads: int
    num_handles: int
    bytes_by_process: dict[tuple[int, str], int]  # by its id and kind


class Processes:
    """The processes that descend from `pid`, or from a process with the mark in its environment.

    Both are needed: a process whose parent was killed is no descendant, and a process that Ray has titled hides its
    environment.
    """

    def __init__(self, pid: int, mark: str) -> None:
        self._pid = pid
        self._mark = f"{MARK}={mark}".encode()

    def all(self) -> list[psutil.Process]:
        """Return the running processes."""
        found: dict[int, psutil.Process] = {}
        for root in self._roots():
            try:
                for process in (root, *root.children(recursive=True)):
                    found[process.pid] = process
            except psutil.Error:
                continue
        return [process for process in found.values() if _is_running(process)]

    def _roots(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            try:
                environment = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if process.pid == self._pid or self._mark in environment:
                yield process

    def of(self, kind: str) -> list[psutil.Process]:
        """Return the processes of a kind, the oldest first."""
        title = KINDS[kind]
        return sorted(
            (process for process in self.all() if title_of(process).startswith(title)), key=lambda each: each.pid
        )

    def at_work(self) -> frozenset[tuple[int, str]]:
        """Return the processes of known kinds, as id and kind; the application is at rest when this set is constant."""
        titles = {process.pid: title_of(process) for process in self.all()}
        return frozenset(
            (pid, kind)
            for pid, title in titles.items()
            for kind, beginning in KINDS.items()
            if title.startswith(beginning)
        )

    def usage(self) -> ProcessUsage:
        """Return the present use."""
        sizes = [size for size in map(_usage_of, self.all()) if size is not None]
        return ProcessUsage(
            sum(size.num_bytes for size in sizes),
            len(sizes),
            sum(size.num_actors for size in sizes),
            sum(size.num_threads for size in sizes),
            sum(size.num_handles for size in sizes),
            {key: num_bytes for size in sizes for key, num_bytes in size.bytes_by_process.items()},
        )


def new_mark() -> str:
    """Return a value for the environment variable `MARK`."""
    return f"{os.getpid()}-{uuid.uuid4().hex[:8]}"


def title_of(process: psutil.Process) -> str:
    """Return the title that Ray gave a process, or its program's name."""
    try:
        title = (process.cmdline() or [process.name()])[0]
    except psutil.Error:  # it has just ended
        return ""
    return title if title.startswith("ray::") else Path(title).name


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _usage_of(process: psutil.Process) -> ProcessUsage | None:
    try:
        title, num_bytes = title_of(process), process.memory_info().rss
        kind = next((kind for kind, beginning in KINDS.items() if title.startswith(beginning)), title)
        named = {(process.pid, kind): num_bytes}
        return ProcessUsage(
            num_bytes, 1, int(title.startswith("ray::")), process.num_threads(), process.num_fds(), named
        )
    except psutil.Error:
        return None
