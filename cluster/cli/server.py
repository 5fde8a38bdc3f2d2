"""The server that a client's command talks to."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Annotated
from urllib.parse import urlsplit

import typer
from httpx import HTTPError
from openai import APIConnectionError, OpenAI, OpenAIError
from typer import Option

from protos.errors import ConfigError, ServingError

URL = "http://127.0.0.1:8000/v1"
API_KEY = "none"
_TIMEOUT_S = 10.0

NOT_UNDERSTOOD = (ValueError, TypeError, AttributeError, LookupError, ArithmeticError, RecursionError)
NO_ANSWER = (OSError, HTTPException, *NOT_UNDERSTOOD)  # of a server that is read without OpenAI's client


class AnswerError(ServingError):
    """A server refuses a request, or its answer is not one."""


@contextmanager
def understood(what: str = "the server's answer") -> Iterator[None]:
    """Raise AnswerError where a server refuses a request, or `what` has not the form that is read from it."""
    try:
        yield
    except (OpenAIError, HTTPError) as error:
        raise AnswerError(str(error)) from None
    except NOT_UNDERSTOOD as error:
        raise AnswerError(f"{what} is not understood: {type(error).__name__}: {error}") from None


def _with_version(url: str) -> str:
    """Return the address of the API; one without a path is that of the server, whose API is at /v1.

    Raises:
        ConfigError: it is no address of a web server.
    """
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError(f"--url {url!r} is no address of a server; give one such as {URL}")
    return url.rstrip("/") + "/v1" if parts.path in {"", "/"} else url


ServerUrl = Annotated[str, Option(help="base address of the server, with /v1 or without", callback=_with_version)]


def finite(value: float | None) -> float | None:
    """Return the value of an option that NaN and infinity are none of."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no finite number")
    return value


def served_model(url: str, api_key: str, model: str | None) -> str:
    """Return `model` if the server has it, or its first one where it is None.

    Raises:
        ConfigError: no server answers there, it refuses the key, or it has no such model.
    """
    if not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("--api-key has a character that no HTTP header can carry; a key is of printable ASCII")
    try:
        with understood(), OpenAI(base_url=url, api_key=api_key, timeout=_TIMEOUT_S, max_retries=0) as client:
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
