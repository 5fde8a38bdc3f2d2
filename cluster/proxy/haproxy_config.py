"""HAProxy's configuration for untrusted clients, made from Serve's.

haproxy.sh runs this program on the file that Serve has written. It imports constants, errors and the standard library
alone.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_network
from pathlib import Path

from protos.errors import ConfigError
from router.client_limits import (
    MAX_CONNECTIONS_PER_ADDRESS,
    MAX_ENDLESS_CALLS,
    MAX_GRPC_CONNECTIONS,
    MAX_HTTP_CONNECTIONS,
    REQUEST_TIMEOUT_S,
)

# For the next byte of a body, and for a client to take more of its answer; waiting for an answer has no limit.
CLIENT_TIMEOUT_S = 60
OPERATOR_ADDRESSES = "127.0.0.1 ::1"
ADDRESS = "src,ipmask(32,64)"  # a client of IPv6 has a network of 2^64 addresses
WAITS_FOR_ROUTES = "waits for routes"  # a HAProxy's description, which standby.py reads
_REASONS = {
    502: "The server's answer broke off; send the request again.",
    503: "No server can take the request now; send it again.",
    504: "The server has not answered in time; send the request again.",
}


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """The part of the configuration that operators choose.

    `certificate_file` holds a certificate chain and its key (PEM) and turns TLS on for HTTP and gRPC. With
    `client_ca_file` clients must have a certificate that this authority has signed. Connections from
    `operator_addresses` (or networks) have places of their own. If any are set, only they get `/metrics`.
    """

    certificate_file: str = ""
    client_ca_file: str = ""
    max_connections_per_address: int = MAX_CONNECTIONS_PER_ADDRESS
    operator_addresses: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> ProxySettings:
        """Read the variables of `cluster.local.serve_environment` and of the operator.

        Raises:
            ConfigError: the limit is no number, or below 4; or an address is malformed.
        """
        limit = environment.get("OUTRIDER_MAX_CONNECTIONS_PER_ADDRESS") or str(MAX_CONNECTIONS_PER_ADDRESS)
        if not limit.isdecimal() or int(limit) < 4:  # a quarter is for gRPC
            raise ConfigError(f"OUTRIDER_MAX_CONNECTIONS_PER_ADDRESS is {limit!r}; set it to a number of 4 or more")
        addresses = environment.get("OUTRIDER_OPERATOR_ADDRESSES", "").replace(",", " ").split()
        for address in addresses:
            try:
                ip_network(address, strict=False)
            except ValueError as error:
                raise ConfigError(
                    f"OUTRIDER_OPERATOR_ADDRESSES has {address!r}: {error}; give addresses, or networks as 10.0.0.0/8"
                ) from None
        certificate, client_ca = (environment.get(f"OUTRIDER_TLS_{name}", "") for name in ("CERTIFICATE", "CLIENT_CA"))
        return cls(certificate, client_ca, int(limit), " ".join(addresses))

    @property
    def known_addresses(self) -> str:
        """The operator's addresses, including this machine's."""
        return f"{OPERATOR_ADDRESSES} {self.operator_addresses}".strip()


def harden(text: str, settings: ProxySettings, has_stand_in: bool = False) -> str:
    """Return Serve's configuration with time-outs, limits, private sockets, and errors with Retry-After.

    Each frontend has one protocol, and HTTP/2 is for gRPC alone: HAProxy keeps the connection of a stalled HTTP/2
    stream open, and only the limits of gRPC calls bound that.

    A hardened text is returned unchanged. While a substitute HAProxy serves (`has_stand_in`), a configuration without
    routes accepts no clients.

    Raises:
        ValueError: this version of Ray generates another text.
    """
    if "# hardened" in text:
        return text
    # Close what others could reach: the admin socket, internal ports, the statistics.
    text = _replace(text, r"mode 666 level admin", "mode 600 level admin")
    text = _replace(text, r"bind :(\d+)", r"bind 127.0.0.1:\1")
    text = _replace(text, r"bind \*:(\d+)(?=\n  stats enable)", r"bind 127.0.0.1:\1")
    # Replace time-outs and error files by our own.
    text = re.sub(r"\n *timeout (http-request|client) .*", "", text)
    text = re.sub(r"\n *errorfile 50\d .*", "", text)
    text = _replace(text, r"\ndefaults\n", f"\ndefaults\n{_defaults()}")
    text = _replace(
        text,
        r"(frontend http_frontend\n *bind [^\n]*)",
        rf"\1{_tls(settings, 'http/1.1')} proto h1\n{_limits(settings, MAX_HTTP_CONNECTIONS)}"
        "    http-after-response set-header Connection close if is_crowded !is_operator\n"
        rf"{_PATH}{_ANSWERS}{_bodies()}{_NO_UPGRADES}{_REQUEST_IDS}{_SERVES_HEADERS}{_metrics_rule(settings)}{_REFUSALS}",
    )
    if "frontend grpc_frontend" in text:
        bind = r"(frontend grpc_frontend\n(?: *#[^\n]*\n)* *bind [^\n]*?)( proto h2)?\n"
        tls, limits = _tls(settings, "h2"), _limits(settings, MAX_GRPC_CONNECTIONS)
        text = _replace(text, bind, rf"\1{tls} proto h2\n{limits}{ENDLESS_CALLS}")
    # Without routes, answer 503, or leave the clients to the substitute.
    if not re.search(r"\n *use_backend (?!grpc_fallback_backend)", text):
        text = _without_routes(text)
        if has_stand_in:
            text = re.sub(r"(frontend (?:http|grpc)_frontend\n(?: *#[^\n]*\n)*) *bind [^\n]*\n", r"\1", text)
    text = re.sub(r"\nglobal\n|^global\n", r"\g<0>    tune.stick-counters 4\n", text, count=1)
    return f"# hardened\n{text}{_OWN_ANSWERS}{_REFUSED_CLIENTS}{ENDLESS_CALLERS}"


def _bodies() -> str:
    """Return rules that bound a body's size and time for every method.

    The first 16 KiB have a time limit of their own. Only a POST may have a longer body; its reader demands a least
    pace. After the answer to such a request the connections are closed: otherwise a client with an early answer could
    keep one open with a byte a minute.
    """
    too_long = _error("A body of %[method] may have 16 KiB, and must have a length.", "invalid_request_error")
    return f"""\
    http-request wait-for-body time {REQUEST_TIMEOUT_S}s
    http-request set-var(txn.body_size) req.body_size
    acl has_length req.hdr(content-length) -m found
    acl is_chunked req.hdr(transfer-encoding) -m found
    acl has_body req.body_len gt 0
    http-request set-var(txn.is_part) bool(true) if {{ req.body_len,sub(txn.body_size) lt 0 }}
    http-request set-var(txn.is_part) bool(true) if is_chunked or !has_length has_body
    acl is_part var(txn.is_part) -m bool
    http-request return status 413 content-type application/json lf-string {too_long} if is_part !METH_POST
    http-request set-header Connection close if is_part or {{ req.hdrs,length gt 6000 }}
    http-after-response set-header Connection close if is_part {{ status ge 400 }}
"""


def _without_routes(text: str) -> str:
    """Return the configuration of a HAProxy without routes: it answers 503 with Retry-After."""
    retry = f"hdr Retry-After 1 string {_error(_REASONS[503])}"
    text = re.sub(r"return status 404 content-type text/plain .*", f"return status 503 {_JSON} {retry}", text)
    text = re.sub(r'grpc-status 5 hdr grpc-message "[^"]*"', f'grpc-status 14 hdr grpc-message "{_REASONS[503]}"', text)
    return re.sub(r"\nglobal\n|^global\n", rf"\g<0>    description {WAITS_FOR_ROUTES}\n", text, count=1)


# HAProxy drops offers of h2c. With any other upgrade Serve's parser, httptools, drops the body (uvicorn#2722).
_NO_UPGRADES = "    http-request del-header Upgrade\n"
# A client's id is in every line of Serve's logs; without one Serve makes one.
_REQUEST_IDS = "    http-request del-header X-Request-Id unless { req.fhdr(X-Request-Id) -m reg ^[!-~]{1,128}$ }\n"
# Serve decodes these as UTF-8, and answers 500 if one has an invalid byte.
_SERVES_NAMES = (
    "(x[-_]session[-_]id|serve[-_]multiplexed[-_]model[-_]id|x-request-(timeout-seconds|disconnect-disabled)|"
    "trace(parent|state))"
)
_SERVES_HEADERS = f"""\
    acl is_unreadable req.hdrs -m reg -i (?m)^{_SERVES_NAMES}:.*[^[:print:][:space:]]
    http-request del-header ^{_SERVES_NAMES}$ -m reg if is_unreadable
"""
# The path as the application reads it, without a slash at its end. Rules compare its end: Serve may have a prefix.
_PATH = "    http-request set-var(txn.path) path,url_dec,rtrim(/)\n"
# gRPC's own form of a refusal: a status of RESOURCE_EXHAUSTED (8) in the headers of an answer without a body.
ENDLESS_CALLS = f"""\
    http-request set-header x-forwarded-for %[src]
    acl is_endless path /grpc.health.v1.Health/Watch
    acl is_endless path_beg /grpc.reflection.
    http-request track-sc1 {ADDRESS} table endless_callers if is_endless
    http-request return status 200 hdr content-type application/grpc hdr grpc-status 8 \
hdr grpc-message "At most {MAX_ENDLESS_CALLS} such calls are open at once; end one first." \
if is_endless {{ sc1_conn_cur gt {MAX_ENDLESS_CALLS} }}
    http-request wait-for-body time {REQUEST_TIMEOUT_S}s if !is_endless
"""
ENDLESS_CALLERS = """
backend endless_callers
    stick-table type ipv6 size 100k expire 60s store conn_cur
"""
_REFUSALS = Path(__file__).with_name("refusals.cfg").read_text(encoding="utf-8")
_ANSWERS = Path(__file__).with_name("answers.cfg").read_text(encoding="utf-8")
_OWN_ANSWERS = """
backend own_answers
    stick-table type integer size 1k store gpc(3)
"""
_REFUSED_CLIENTS = """
backend clients
    stick-table type binary len 32 size 100k expire 60s store gpc(2),gpc_rate(2,2s)
backend refusals
    stick-table type binary len 32 size 100k expire 60s store gpc0,gpc0_rate(5s),gpt0
"""


def _replace(text: str, pattern: str, replacement: str) -> str:
    text, count = re.subn(pattern, replacement, text)
    if count == 0:
        raise ValueError(f"Serve's HAProxy configuration has no {pattern!r}; this version of Ray generates another one")
    return text


def _defaults() -> str:
    lines = [f"timeout http-request {REQUEST_TIMEOUT_S}s", f"timeout client {CLIENT_TIMEOUT_S}s"]
    lines += [
        f"http-error status {status} {_JSON} hdr Retry-After 1 string {_error(reason)}"
        for status, reason in _REASONS.items()
    ]
    return "".join(f"    {line}\n" for line in lines)


_JSON = "content-type application/json"


def _error(reason: str, kind: str = "service_unavailable_error") -> str:
    """Return an error's JSON as one word of HAProxy's configuration, its quotes escaped once more for `re.sub`."""
    error = {"message": reason, "type": kind, "param": None, "code": None}
    return '"' + json.dumps({"error": error}).replace('"', '\\\\"') + '"'


def _limits(settings: ProxySettings, max_connections: int) -> str:
    """Return rules that keep one or a few addresses from taking all places of a frontend."""
    most = settings.max_connections_per_address * max_connections // MAX_HTTP_CONNECTIONS
    share = most if most >= max_connections else most // 4  # once half of all places are taken
    return (
        "    stick-table type ipv6 size 100k expire 60s store conn_cur\n"
        f"    tcp-request connection track-sc0 {ADDRESS}\n"
        f"    tcp-request connection reject if {{ sc0_conn_cur gt {most} }}\n"
        f"    acl is_operator src {settings.known_addresses}\n"
        f"    acl is_crowded fe_conn gt {max_connections // 2}\n"
        f"    tcp-request connection reject if is_crowded {{ sc0_conn_cur gt {share} }} !is_operator\n"
        f"    tcp-request connection reject if {{ fe_conn gt {max_connections} }} !is_operator\n"
    )


def _metrics_rule(settings: ProxySettings) -> str:
    if not settings.operator_addresses:
        return ""
    return "    http-request deny deny_status 403 if { var(txn.path) -m end -i /metrics } !is_operator\n"


def _tls(settings: ProxySettings, protocols: str) -> str:
    if not settings.certificate_file:
        return ""
    client = f" ca-file {settings.client_ca_file} verify required" if settings.client_ca_file else ""
    return f" ssl crt {settings.certificate_file} alpn {protocols} ssl-min-ver TLSv1.2{client}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    hardened = harden(path.read_text(encoding="utf-8"), ProxySettings.of(os.environ), has_stand_in=len(sys.argv) > 2)
    path.write_text(hardened, encoding="utf-8")
