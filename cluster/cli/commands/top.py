"""`outrider top`: a live view of a running server in the terminal."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from cluster.cli.server import (
    API_KEY,
    URL,
    AnswerError,
    ApiKey,
    Reading,
    ServerUrl,
    read_metrics,
    request_page,
    understood,
)
from protos.errors import ConfigError


def top(
    url: ServerUrl = URL,
    api_key: ApiKey = API_KEY,
    interval_s: Annotated[float, Option(min=0.2, help="seconds between updates")] = 2.0,
) -> None:
    """Watch a server: pairs, acceptance by class, tokens per second, KV, queues, alarms; q quits."""
    try:
        from cluster.cli.top_view import TopView  # textual comes with the extra `top`
    except ImportError as error:
        raise ConfigError(f"outrider top needs {error.name}; pip install 'outrider[top]'") from error

    def read() -> Reading:
        with understood():
            return read_metrics(request_page(url, api_key, "/metrics").raise_for_status().text)

    try:
        read()
    except AnswerError as error:
        raise ConfigError(f"cannot get metrics from {url}: {error}; start a server, or give --url") from None
    TopView(read, interval_s).run()
