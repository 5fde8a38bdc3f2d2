"""Work that ends when the client leaves, and connections that end when the answer precedes the request's end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


class CloseUnread:
    """ASGI middleware: an answer before the end of its request's body is the last one of its connection."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not has_body(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        is_read = False
        is_awaited = (
            Headers(scope=scope).get("expect", "").lower() == "100-continue"
        )  # the first look asks for the body

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

        await self._app(scope, noting_receive, closing_send)


def has_body(headers: Headers) -> bool:
    """True if a request with these headers has a body."""
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
