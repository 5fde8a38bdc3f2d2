"""Headers around every answer: the request's fields that were ignored, and those that let web pages call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import quote

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.openai.http_body import IGNORED_FIELDS

_HEADER = "X-Ignored-Fields"
_MAX_HEADER_CHARACTERS = 2048


class NameIgnoredFields:
    """ASGI middleware; an answer names the fields of its request that were read past, escaped as in a URL."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})

        async def naming_send(message: Message) -> None:
            if message["type"] == "http.response.start" and (names := state.get(IGNORED_FIELDS)):
                value = ", ".join(quote(name, errors="replace") for name in names)
                MutableHeaders(scope=message)[_HEADER] = value[:_MAX_HEADER_CHARACTERS]
            await send(message)

        await self._app(scope, receive, naming_send)


def add_cors(app: FastAPI, origins: Sequence[str]) -> None:
    """Let pages of these origins call; a star matches anything, as in `http://localhost:*`."""
    if not origins:
        return
    app.add_middleware(
        CORSMiddleware,
        allow_origin_regex=origins_pattern(origins).pattern,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=[_HEADER, "X-Request-Id", "Retry-After"],
    )


def origins_pattern(origins: Sequence[str]) -> re.Pattern[str]:
    """Return the pattern of these origins."""
    patterns = [re.escape(origin).replace(r"\*", ".*" if origin == "*" else "[^/@]*") for origin in origins]
    return re.compile("|".join(patterns) if patterns else "(?!)")
