"""The answers of a server in one form, for texts and chats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from cluster.cli.audit.prediction import Prediction
from cluster.cli.audit.wire import Body

NOT_READABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)


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
    except NOT_READABLE:
        return ()


def choices_in(data: Any, num_top: int) -> tuple[Choice, ...]:
    """Return the choices of a body, with at most `num_top` alternatives of each token (0: all).

    Raises one of `NOT_READABLE` for another form.
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
