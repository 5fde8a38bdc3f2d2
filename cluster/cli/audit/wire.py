"""HTTP to a server that may send anything: answers and events in time, in one form for texts and chats.

For anything else `NoVerdictError` is raised, with a sentence.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from cluster.cli.audit.evidence import Prediction
from cluster.cli.server import NOT_UNDERSTOOD
from protos.client_text import for_log

TIMEOUT_S = 60.0
_MAX_BYTES = 64 << 20  # of an answer
Body = dict[str, Any]


class NoVerdictError(Exception):
    """A check cannot reach a verdict; the message is a sentence for the report."""


class RefusedError(NoVerdictError):
    """The server refuses a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the server refuses with status {status}: {message}")
        self.status = status
        self.message = message


async def fetch(http: httpx.AsyncClient, method: str, url: str, body: Any, timeout_s: float) -> httpx.Response:
    """Return a whole answer.

    Raises:
        NoVerdictError: it is late, broken or too long.
    """
    async with open_answer(http, method, url, body, timeout_s) as response:
        return await whole(response)


@asynccontextmanager
async def open_answer(
    http: httpx.AsyncClient, method: str, url: str, body: Any, timeout_s: float
) -> AsyncIterator[httpx.Response]:
    """Open an answer that must end in time, however slowly its bytes come."""
    try:
        async with asyncio.timeout(timeout_s), http.stream(method, url, json=body, timeout=timeout_s) as response:
            yield response
    except (TimeoutError, httpx.TimeoutException):
        raise NoVerdictError(f"the server does not answer (no whole answer within {timeout_s:.0f} s)") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoVerdictError(f"the server does not answer ({error or type(error).__name__})") from None


async def _parts(response: httpx.Response) -> AsyncIterator[bytes]:
    size = 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > _MAX_BYTES:
            raise NoVerdictError(f"an answer is longer than {_MAX_BYTES >> 20} MiB")
        yield part


async def whole(response: httpx.Response) -> httpx.Response:
    """Return a whole answer, without its headers except for the time to wait."""
    headers = {"retry-after": response.headers.get("retry-after", "")}
    return httpx.Response(
        response.status_code, headers=headers, content=b"".join([each async for each in _parts(response)])
    )


async def events(response: httpx.Response) -> AsyncIterator[tuple[float, Body]]:
    """Yield the events of a streamed answer with their times. Raises NoVerdictError for one in another form."""
    rest = b""
    async for part in _parts(response):
        *lines, rest = (rest + part).split(b"\n")
        for data in (line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")):
            if data != b"[DONE]":
                yield time.monotonic(), _event(data)


def _event(data: bytes) -> Body:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NoVerdictError(f"a stream has an event that is not JSON ({error})"[:300]) from None
    if not isinstance(event, dict):
        raise NoVerdictError(f"a stream has the event {data[:60]!r}")
    return event


def message_of(response: httpx.Response) -> str:
    """Return the reason of a refusal, for a terminal."""
    try:
        error = response.json()
        error = error.get("error", error)
        text = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = response.text
    return for_log(" ".join(str(text).split())) or "no reason given"


def retry_after(response: httpx.Response, default_s: float) -> float:
    """Return the seconds that a busy server asks for, else the default."""
    try:
        return max(0.05, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return default_s


@dataclass(frozen=True, slots=True)
class Request:
    """A request that can be sent again."""

    url: str
    body: Body


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice: its text, its tokens with their predictions if there are logprobs, and a chat's tool calls."""

    text: str
    finish_reason: str | None
    tokens: tuple[str, ...] = ()
    predictions: tuple[Prediction, ...] = ()
    calls: tuple[tuple[str, str], ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer with the request that it belongs to."""

    request: Request
    choices: tuple[Choice, ...]
    data: Body

    @property
    def usage(self) -> Body:
        usage = self.data.get("usage")
        return usage if isinstance(usage, dict) else {}

    @property
    def first_prediction(self) -> Prediction | None:
        """The distribution of the first token, None if no choice reports it."""
        return next((choice.predictions[0] for choice in self.choices if choice.predictions), None)

    def count(self, name: str) -> int | None:
        """A count of the usage object."""
        number = self.usage.get(name)
        return number if isinstance(number, int) and not isinstance(number, bool) else None


def choices_of(response: httpx.Response) -> tuple[Choice, ...]:
    """Return the choices of an answer; empty if it has none that can be read."""
    try:
        return choices_in(response.json(), 0)
    except NOT_UNDERSTOOD:
        return ()


def choices_in(data: Any, num_top: int) -> tuple[Choice, ...]:
    """Return the choices of a body, with at most `num_top` alternatives of each token (0: all).

    Raises one of `NOT_UNDERSTOOD` for another form.
    """
    return tuple(_choice(each, num_top or 1000) for each in data["choices"])


def _choice(data: Mapping[str, Any], num_top: int) -> Choice:
    message = data.get("message") or {}
    text = data.get("text", message.get("content")) or ""
    entries = _logprobs(data.get("logprobs") or {})
    calls = tuple(
        (str(call["function"]["name"]), str(call["function"]["arguments"])) for call in message.get("tool_calls") or ()
    )
    if not isinstance(text, str):
        raise TypeError("a text is not a string")
    return Choice(
        text,
        data.get("finish_reason"),
        tuple(str(token) for token, _ in entries),
        tuple(Prediction.of(top, num_top) for _, top in entries),
        calls,
        tuple(data.get("token_ids") or ()),
    )


def _logprobs(data: Mapping[str, Any]) -> list[tuple[str, Mapping[str, float]]]:
    """Return tokens and alternatives from a chat's form, which llama-server has for texts too, or from a text's."""
    if content := data.get("content"):
        return [
            (entry["token"], {each["token"]: float(each["logprob"]) for each in entry.get("top_logprobs") or ()})
            for entry in content
        ]
    return list(zip(data.get("tokens") or (), (top or {} for top in data.get("top_logprobs") or ()), strict=False))
