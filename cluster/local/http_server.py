"""The HTTP server without Ray: uvicorn with TLS and with HAProxy's limits of clients."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import ssl
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from ipaddress import ip_network
from types import FrameType
from typing import Any

import httptools
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from protos.errors import ConfigError
from router.client_limits import (
    KEEP_ALIVE_S,
    MAX_CONNECTIONS_PER_ADDRESS,
    MAX_GRPC_CONNECTIONS,
    MAX_HEAD_BYTES,
    MAX_HTTP_CONNECTIONS,
    NUM_OPERATOR_CONNECTIONS,
    REQUEST_TIMEOUT_S,
    UNREAD_S,
)
from router.grpc_api.callers import client_of, ip_of

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_ACCEPTED_AT_ONCE = 64  # accepted before one of them is counted
DRAIN_S = 30  # for running requests, after the first Ctrl-C

logger = logging.getLogger(__name__)

_FORBIDDEN = PlainTextResponse("The metrics are for the operator's addresses.\n", status_code=403)


def share_of_files(num_wanted: int) -> int:
    """Return the part of `num_wanted` connections that the process can open in addition to its other files.

    Raise the limit of open files as far as allowed. If all kinds of connections do not fit, each gets its share.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    num_own = len(os.listdir("/dev/fd")) + 48 + _ACCEPTED_AT_ONCE  # 48 more for all other files of this process
    num_left = most - num_own
    num_all = MAX_HTTP_CONNECTIONS + NUM_OPERATOR_CONNECTIONS + MAX_GRPC_CONNECTIONS
    return num_wanted if most == resource.RLIM_INFINITY else max(1, min(num_wanted, num_left * num_wanted // num_all))


class Places:
    """The limits of open connections: of all clients, of each address, and extra ones for the operator's addresses."""

    def __init__(
        self,
        operators: str = "127.0.0.1 ::1",
        max_of_address: int = MAX_CONNECTIONS_PER_ADDRESS,
    ) -> None:
        """`operators` are addresses and networks, with spaces between them."""
        self._operators = [ip_network(each, strict=False) for each in operators.split()]
        self._max_connections = share_of_files(MAX_HTTP_CONNECTIONS)
        self._num_more = share_of_files(NUM_OPERATOR_CONNECTIONS)
        self._max_of_address = max_of_address
        self._num_of: Counter[str] = Counter()

    def take(self, host: str) -> Callable[[], None] | None:
        """Take a place for a connection from `host`. Return a function that frees it once, or None if all are taken."""
        name = client_of(ip_of(host))
        limit = self._max_connections + (self._num_more if self.is_operator(host) else 0)
        if self._num_of.total() >= limit or self._num_of[name] >= self._max_of_address:
            return None
        self._num_of[name] += 1
        taken = [name]

        def leave() -> None:
            while taken:
                name = taken.pop()
                self._num_of[name] -= 1
                if not self._num_of[name]:
                    del self._num_of[name]

        return leave

    def is_operator(self, host: str) -> bool:
        """True if the address may take the operators' places."""
        ip = ip_of(host)
        return any(ip in network for network in self._operators)


class _Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with time-outs for a client's sending and reading, and no upgrades.

    The server ignores an upgrade and answers the request, as RFC 9110 (7.8) allows: Java's client offers h2c with each
    request. httptools stops at such a request and drops the body (uvicorn#2722), so the request is parsed again.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _unread_timer: asyncio.TimerHandle | None = None
    _num_head_bytes = 0

    def __init__(self, *args: Any, leave: Callable[[], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._leave = leave

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()
        self._stop(self._head_timer)
        self._stop(self._unread_timer)
        if self.transport is not None:  # None after a failed TLS handshake
            super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(400, "this is no HTTP/1.1 request.")
        else:
            self._check_head(len(data))

    def _check_head(self, num_bytes: int) -> None:
        """Limit the time and the bytes of a request's head."""
        if self.cycle is not None and not self.cycle.response_complete:
            return
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._refuse_head()
        elif self._head_timer is None:
            self._await_head()

    def _refuse_head(self) -> None:
        self._refuse(431, f"the head of the request is longer than {MAX_HEAD_BYTES} bytes.")

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(REQUEST_TIMEOUT_S, self._end_wait)

    def _end_wait(self) -> None:
        if not self._num_head_bytes:
            self.transport.close()
        self._refuse(408, f"no whole request has come within {REQUEST_TIMEOUT_S} seconds.")

    def _refuse(self, status: int, reason: str) -> None:
        """Answer an invalid request, and close."""
        if self.transport.is_closing():
            return
        text = f"{reason}\n".encode()
        head = f"Content-Type: text/plain\r\nContent-Length: {len(text)}\r\nConnection: close\r\n\r\n"
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(STATUS_LINE[status] + head.encode() + text)
        self.transport.close()

    def _should_upgrade(self) -> bool:
        return True  # uvicorn then leaves such a request to `_ignore_upgrade`

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Parse the request again without its upgrade; `rest` are the bytes after its headers."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse(405, "this server is no proxy.")
            return
        lines = [b"%b %b HTTP/%b" % (method, self.url, self.parser.get_http_version().encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] not in (b"upgrade", b"http2-settings")]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"\r\n".join([*lines, b"", rest]))

    def on_headers_complete(self) -> None:
        self._stop(self._head_timer)
        self._head_timer = None
        self._num_head_bytes = 0
        if len(self.url) + sum(len(name) + len(value) for name, value in self.headers) > MAX_HEAD_BYTES:
            self._refuse_head()  # it has come at once
            return
        super().on_headers_complete()
        if self.scope.get("http_version") == "1.0" and self.cycle is not None:
            self.cycle.send = partial(_send_unchunked, self.cycle, self.cycle.send)  # type: ignore[method-assign]

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_timer = self.loop.call_later(UNREAD_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop(self._unread_timer)

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()


async def _send_unchunked(
    cycle: RequestResponseCycle, send: Callable[[Any], Awaitable[None]], message: Message
) -> None:
    """Send a message of an answer to HTTP/1.0, which knows no chunks: the body ends with the connection.

    uvicorn writes a body in chunks unless its length is known, so each part is given as the whole.
    """
    if message["type"] == "http.response.start":
        has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
        cycle.chunked_encoding = None if has_length else False
    elif cycle.expected_content_length == 0:
        cycle.expected_content_length = len(message.get("body", b""))
    await send(message)


class _Newcomer(asyncio.Protocol):
    """An accepted connection: takes a place, makes the TLS handshake, then speaks HTTP."""

    def __init__(self, places: Places, make: Callable[..., _Protocol], context: ssl.SSLContext | None) -> None:
        self._places = places
        self._make = make
        self._context = context
        self._task: asyncio.Task[None] | None = None  # the loop keeps no reference

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        leave = self._places.take(transport.get_extra_info("peername")[0])
        if leave is None:
            transport.abort()
            return
        protocol = self._make(leave=leave)
        if self._context is None:
            transport.set_protocol(protocol)
            protocol.connection_made(transport)
        else:
            transport.pause_reading()
            self._task = asyncio.create_task(self._secure(transport, protocol, self._context, leave))

    async def _secure(
        self, transport: asyncio.Transport, protocol: _Protocol, context: ssl.SSLContext, leave: Callable[[], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        try:
            secured = await loop.start_tls(
                transport, protocol, context, server_side=True, ssl_handshake_timeout=REQUEST_TIMEOUT_S
            )
        except OSError:  # includes ssl.SSLError and time-outs
            leave()
            transport.abort()
            return
        if secured is None:
            leave()
            return
        protocol.connection_made(secured)


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """False for the traceback that uvicorn logs of each request which a stop ends."""
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


class HttpServer(uvicorn.Server):
    """A server that stops at SIGINT or SIGTERM, at once after a second one, and keeps the exit status.

    Args:
        app: the ASGI application.
        host, port: the address to listen at.
        places: the connections that clients may have.
        tls: files of the certificate with its key, and of the authority that signs clients' certificates.
    """

    def __init__(self, app: Any, host: str, port: int, places: Places, tls: tuple[str | None, str | None]) -> None:
        self._places = places
        self._host, self._port = host, port
        logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
        certificate, client_ca = tls
        verify = ssl.CERT_NONE if client_ca is None else ssl.CERT_REQUIRED
        super().__init__(
            uvicorn.Config(
                app,
                interface="asgi3",  # a partial function is not recognized
                access_log=False,
                log_level="error",  # without its line for each connection that sends no HTTP
                ws="none",
                lifespan="off",
                timeout_graceful_shutdown=DRAIN_S,
                timeout_keep_alive=KEEP_ALIVE_S,
                ssl_certfile=certificate,
                ssl_ca_certs=client_ca,
                ssl_cert_reqs=verify,
            )
        )

    def _report_rarely(self) -> None:
        """Make the loop log failures to accept once a minute; it retries each second."""
        loop = asyncio.get_running_loop()
        last_s = -60.0

        def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
            nonlocal last_s
            if "socket.accept()" not in context["message"]:
                loop.default_exception_handler(context)
            elif time.monotonic() - last_s >= 60.0:
                last_s = time.monotonic()
                logger.error("no connection can be accepted: %s", context.get("exception"))

        loop.set_exception_handler(report)

    async def startup(self, sockets: Any = None) -> None:
        """Listen. Raises ConfigError if the address is not available."""
        try:
            server = await asyncio.get_running_loop().create_server(
                self._newcomer, self._host, self._port, backlog=_ACCEPTED_AT_ONCE, start_serving=False
            )
        except OSError as error:
            raise ConfigError(
                f"HTTP cannot listen at {self._host}:{self._port}: {error}; choose another --host or --port"
            ) from None
        self._report_rarely()
        await super().startup(sockets=[])
        self.servers.append(server)
        await server.start_serving()
        for each in server.sockets:  # asyncio accepts as many at once as it queues, so the longer queue comes after
            with socket.fromfd(each.fileno(), each.family, each.type) as listener:
                listener.listen(2048)

    def _newcomer(self) -> asyncio.Protocol:
        make = partial(_Protocol, self.config, self.server_state, self.lifespan.state)
        return _Newcomer(self._places, make, self.config.ssl)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop after the running requests, and at a second signal at once."""
        self.force_exit = self.should_exit
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)


async def metrics_for_operators(app: ASGIApp, scope: Scope, receive: Receive, send: Send, places: Places) -> None:
    """Serve `/metrics` only to the operators' addresses of `places`. ASGI middleware."""
    is_refused = (
        scope["type"] == "http"
        and scope["path"].rstrip("/").lower() == "/metrics"
        and not places.is_operator(scope["client"][0])
    )
    await (_FORBIDDEN if is_refused else app)(scope, receive, send)
