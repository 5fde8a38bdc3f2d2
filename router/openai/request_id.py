"""The header `X-Request-Id`, which Serve's proxy adds in a cluster: the client's own, or a new one."""

from __future__ import annotations

import uuid

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADER = "x-request-id"


class AddRequestId:
    """Middleware that gives request and response the same id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = MutableHeaders(scope=scope)
        request_id = headers.setdefault(_HEADER, str(uuid.uuid4()))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).setdefault(_HEADER, request_id)
            await send(message)

        await self._app(scope, receive, send_with_id)
