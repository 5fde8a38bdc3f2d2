"""Options and checks of the server that client commands use."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import typer
from openai import APIConnectionError, OpenAI, OpenAIError
from typer import Option

from protos.errors import ConfigError, ServingError

URL = "http://127.0.0.1:8000/v1"
API_KEY = "none"

NOT_UNDERSTOOD = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)


class AnswerError(ServingError):
    """A server refuses a request, or its answer cannot be read."""


@contextmanager
def understood(what: str = "the server's answer") -> Iterator[None]:
    """Raise AnswerError if a server refuses a request, or `what` has an unexpected form."""
    try:
        yield
    except (OpenAIError, httpx.HTTPError, httpx.InvalidURL) as error:
        raise AnswerError(str(error)) from None
    except NOT_UNDERSTOOD as error:
        raise AnswerError(f"{what} has an unexpected form: {type(error).__name__}: {error}") from None


def base_url(url: str | None) -> str | None:
    """Return the address of the API, None without one. An address without a path gets /v1.

    Raises:
        ConfigError: it is not the address of a web server.
    """
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(f"--url {url!r} is not the address of a server; give one such as {URL}")
    return url.rstrip("/") + "/v1" if parts.path in {"", "/"} else url


ServerUrl = Annotated[str, Option(help="base address of the server, with or without /v1", callback=base_url)]


def finite(value: float | None) -> float | None:
    """Reject NaN and infinity."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def request_page(url: str, api_key: str, path: str, body: Any = None, timeout_s: float = 5.0) -> httpx.Response:
    """Return a page of the server at `url` that is not below /v1; POST a `body`. Raises httpx.HTTPError."""
    address = url.rstrip("/").removesuffix("/v1") + path
    headers = {"Authorization": f"Bearer {api_key}"}
    return httpx.request("GET" if body is None else "POST", address, json=body, headers=headers, timeout=timeout_s)


def served_model(url: str, api_key: str, model: str | None) -> str:
    """Return `model` if the server has it, or the server's first model if it is None.

    Raises:
        ConfigError: the server does not respond, refuses the key, or has no such model.
    """
    if not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("--api-key has a character that an HTTP header cannot carry; use printable ASCII")
    try:
        with understood(), OpenAI(base_url=url, api_key=api_key, timeout=10.0, max_retries=0) as client:
            names = _model_names(client, url)
    except AnswerError as error:
        raise ConfigError(f"the server at {url} does not list its models: {error}") from None
    if model is None and names:
        return names[0]
    if model is None or model not in names:
        raise ConfigError(f"the server at {url} has no model {model!r}; it has {', '.join(names) or 'none'}")
    return model


def _model_names(client: OpenAI, url: str) -> list[str]:
    try:
        names = [each.id for each in client.models.list().data]
    except APIConnectionError:
        raise ConfigError(f"no server answers at {url}; start one (`outrider serve demo`), or give --url") from None
    if not all(isinstance(name, str) for name in names):
        raise TypeError("a model has no name")
    return names
