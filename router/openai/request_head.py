"""Heads of requests before any endpoint sees them, and of answers: ids, paths, hosts, origins, ignored fields."""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protos.errors import MisdirectedRequestError, PermissionDeniedError, ServingError
from router.openai.errors import error_response
from router.openai.http_body import IGNORED_FIELDS

_IGNORED_HEADER = "X-Ignored-Fields"

_HEADER = "x-request-id"
_ID = re.compile(r"[!-~]{1,128}")  # goes into logs and back to the client
_HOST = re.compile(r"[^\s/?#@\\]+")  # a name and a port: nothing that an address has before or after them
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def around(handle: Callable[..., Coroutine[Any, Any, None]], **options: Any) -> Callable[[ASGIApp], ASGIApp]:
    """Return the middleware whose calls `handle(app, scope, receive, send, **options)` answers."""
    return lambda app: partial(handle, app, **options)


async def name_ignored_fields(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Name the ignored fields of a request in its answer, escaped as in a URL. ASGI middleware."""
    if scope["type"] != "http":
        await app(scope, receive, send)
        return
    state = scope.setdefault("state", {})

    async def naming_send(message: Message) -> None:
        if message["type"] == "http.response.start" and (names := state.get(IGNORED_FIELDS)):
            value = ", ".join(quote(name, errors="replace") for name in names)
            MutableHeaders(scope=message)[_IGNORED_HEADER] = value[:2048]
        await send(message)

    await app(scope, receive, naming_send)


def add_cors(app: FastAPI, origins: Sequence[str]) -> None:
    """Let pages of these origins call; a star matches anything, as in `http://localhost:*`."""
    if not origins:
        return
    app.add_middleware(
        CORSMiddleware,
        allow_origin_regex=origins_pattern(origins).pattern,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[_IGNORED_HEADER, "X-Request-Id", "Retry-After"],
    )


def origins_pattern(origins: Sequence[str]) -> re.Pattern[str]:
    """Return the pattern of these origins."""
    patterns = [re.escape(origin).replace(r"\*", ".*" if origin == "*" else "[^/@]*") for origin in origins]
    return re.compile("|".join(patterns) if patterns else "(?!)")


async def begin_in_turn(app: ASGIApp, scope: Scope, receive: Receive, send: Send, places: asyncio.Semaphore) -> None:
    """Begin a burst of requests with bodies a few at a time, so that running streams get their turns. ASGI middleware.

    Probes have no bodies and begin at once: all of a burst share one answer of the pairs. `places` are for requests
    that begin in one turn of the event loop.
    """
    if scope["type"] == "http" and has_body(Headers(scope=scope)):
        async with places:
            await asyncio.sleep(0)
    await app(scope, receive, send)


async def add_request_id(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Give request and response the same id: the client's own, or a new one. ASGI middleware.

    Serve's proxy adds it in a cluster.
    """
    if scope["type"] != "http":
        await app(scope, receive, send)
        return
    headers = MutableHeaders(scope=scope)
    request_id = headers.get(_HEADER, "")
    if not _ID.fullmatch(request_id):
        request_id = headers[_HEADER] = str(uuid.uuid4())

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            MutableHeaders(scope=message).setdefault(_HEADER, request_id)
        await send(message)

    await app(scope, receive, send_with_id)


async def one_slash(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Ignore doubled slashes and one at the end of a path, which joined addresses have. ASGI middleware.

    `/metrics` has one path only, so that a proxy can reserve it for operators.
    """
    path = scope.get("path", "")
    if "//" in path or path.endswith("/"):
        plain = re.sub("/+", "/", path).rstrip("/") or "/"
        if plain != "/metrics":
            scope = {**scope, "path": plain}
    await app(scope, receive, send)


def names_of_server(http_host: str | None, more: Sequence[str]) -> tuple[str, ...]:
    """Return the names that a request's Host may have; none where it may have any.

    A server on loopback is meant for this machine. A web page can give a name of its own this machine's address (DNS
    rebinding), and would be let in by the browser then. `more` are configured, with a star for any part.
    """
    names = (*_LOOPBACK, *more) if http_host in _LOOPBACK else more
    return tuple(name.lower() for name in names)


async def check_host(
    app: ASGIApp,
    scope: Scope,
    receive: Receive,
    send: Send,
    names: Sequence[str],
    origins: re.Pattern[str] | None,
) -> None:
    """Answer requests to this server alone; without keys no foreign page changes anything. ASGI middleware.

    `names` are this server's. `origins` is a pattern of the web pages that may call; None where each request needs a
    key.
    """
    error = _host_error(scope["method"], Headers(scope=scope), names, origins) if scope["type"] == "http" else None
    await (app if error is None else error_response(error))(scope, receive, send)


def _host_error(
    method: str, headers: Headers, names: Sequence[str], origins: re.Pattern[str] | None
) -> ServingError | None:
    hosts = headers.getlist("host")  # HTTP/1.0 has none
    host = ", ".join(hosts)
    if host and not (len(hosts) == 1 and _is_among(host, names)):
        return MisdirectedRequestError(
            f"This server does not answer to the name {host[:200]!r}; it has {', '.join(names)}. Add the name to "
            "ingress.allowed_hosts if it is one of yours."
        )
    origin = headers.get("origin")
    if origin is None or origins is None or method in _SAFE_METHODS:
        return None
    if origins.fullmatch(origin) or _is_among(origin.partition("://")[2], names):
        return None
    return PermissionDeniedError(
        f"The web page {origin[:200]!r} may not call this server; add it to ingress.cors_origins if it may."
    )


def _is_among(host: str, names: Sequence[str]) -> bool:
    if not _HOST.fullmatch(host):
        return False
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    return any(fnmatch(name, each) for each in names)


Result = TypeVar("Result")


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`, which is cancelled if the client goes away first. The body must have been read.

    Raises:
        ClientDisconnect: the client went away.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def close_unread(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Make an answer before the end of its request's body the last one of its connection. ASGI middleware."""
    if scope["type"] != "http" or not has_body(Headers(scope=scope)):
        await app(scope, receive, send)
        return
    is_read = False
    is_awaited = Headers(scope=scope).get("expect", "").lower() == "100-continue"  # the first look asks for the body

    async def noting_receive() -> Message:
        nonlocal is_read, is_awaited
        is_awaited = False
        message = await receive()
        is_read = is_read or not message.get("more_body", False)
        return message

    async def read_rest(within_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                while not is_read and not is_awaited:
                    await noting_receive()

    async def closing_send(message: Message) -> None:
        # An early answer: close the connection after it, since unread bytes would be taken for the next request.
        if message["type"] == "http.response.start" and not is_read:
            await read_rest(0)  # a small body has come whole already
        if message["type"] == "http.response.start" and not is_read:
            MutableHeaders(scope=message)["Connection"] = "close"
        if is_read or message["type"] != "http.response.body" or message.get("more_body", False):
            await send(message)
            return
        # Drain the body for a while: closing at once would reset the connection before the client reads the answer.
        await send({**message, "more_body": True})
        await read_rest(1.0)  # for a client that reads its answer only when it has sent its body
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    await app(scope, noting_receive, closing_send)


def has_body(headers: Headers) -> bool:
    """True if a request with these headers has a body."""
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
