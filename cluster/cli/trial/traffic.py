"""A log of OpenAI requests, one JSON object per line."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from protos.errors import ConfigError

_DROPPED = ("model", "stream", "stream_options", "speculation")  # the trial sets these


@dataclass(frozen=True, slots=True)
class TrafficRequest:
    """A request of a log: its line, its path, and its body without the fields that the trial sets."""

    line: int
    path: str
    body: dict[str, Any]


def read_traffic(file: Path, max_requests: int, max_tokens: int) -> list[TrafficRequest]:
    """Return the first requests of a log, with answers of at most `max_tokens`.

    A line is a request's body, or an object with a `body`, as in OpenAI's batch files. Empty lines are skipped.

    Raises:
        ConfigError: the file is unreadable or empty, or a line is not a request; the message names the line.
    """
    requests: list[TrafficRequest] = []
    try:
        with file.open(encoding="utf-8") as lines:
            for number, text in enumerate(lines, start=1):
                if text.strip() and len(requests) < max_requests:
                    requests.append(_request(file, number, text, max_tokens))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; give a file of JSON lines in UTF-8") from error
    if not requests:
        raise ConfigError(f"{file} has no request; write one OpenAI request per line")
    return requests


def _request(file: Path, number: int, text: str, max_tokens: int) -> TrafficRequest:
    try:
        entry = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{file}, line {number} is not JSON: {error}; write one OpenAI request per line") from error
    body = entry.get("body", entry) if isinstance(entry, dict) else None
    if not isinstance(body, dict) or ("messages" in body) == ("prompt" in body):
        raise ConfigError(f"{file}, line {number} is not a request: it needs either `messages` or `prompt`")
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    body = {key: value for key, value in body.items() if key not in _DROPPED}
    limit = body.pop("max_completion_tokens", None) or body.get("max_tokens") or max_tokens
    if not isinstance(limit, int):
        raise ConfigError(f"{file}, line {number}: max_tokens is {limit!r}, which is not a whole number")
    return TrafficRequest(number, path, {**body, "max_tokens": min(limit, max_tokens)})
