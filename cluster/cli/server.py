"""The server that a client's command talks to."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from openai import APIConnectionError, OpenAI, OpenAIError
from typer import Option

from protos.errors import ConfigError

URL = "http://127.0.0.1:8000/v1"
API_KEY = "none"
_TIMEOUT_S = 10.0


def _with_version(url: str) -> str:
    """Return the address of the API; one without a path is that of the server, whose API is at /v1."""
    return url.rstrip("/") + "/v1" if urlsplit(url).path in {"", "/"} else url


ServerUrl = Annotated[str, Option(help="base address of the server, with /v1 or without", callback=_with_version)]


def served_model(url: str, api_key: str, model: str | None) -> str:
    """Return `model` if the server has it, or its first one where it is None.

    Raises:
        ConfigError: no server answers there, it refuses the key, or it has no such model.
    """
    try:
        with OpenAI(base_url=url, api_key=api_key, timeout=_TIMEOUT_S, max_retries=0) as client:
            names = [each.id for each in client.models.list().data]
    except APIConnectionError:
        raise ConfigError(f"no server answers at {url}; start one (`outrider serve demo`), or give --url") from None
    except OpenAIError as error:
        raise ConfigError(f"the server at {url} does not list its models: {error}") from None
    if model is None and names:
        return names[0]
    if model is None or model not in names:
        raise ConfigError(f"the server at {url} has no model {model!r}; it has {', '.join(names) or 'none'}")
    return model
