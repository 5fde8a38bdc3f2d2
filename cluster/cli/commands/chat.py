"""`outrider chat`: a conversation in the terminal with any OpenAI server."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

from openai import OpenAI, OpenAIError
from typer import Option

from cluster.cli.console import console, report, report_error
from cluster.cli.server import API_KEY, URL, ServerUrl, served_model

_HELP = "Ctrl-D ends, Ctrl-C stops an answer, /new forgets the conversation"


def chat(
    url: ServerUrl = URL,
    model: Annotated[str | None, Option(help="by default the first that the server lists")] = None,
    api_key: Annotated[str, Option(envvar="OPENAI_API_KEY", help="key of the server")] = API_KEY,
    system: Annotated[str | None, Option(help="the system message")] = None,
    temperature: Annotated[float | None, Option(min=0.0, help="by default the server's")] = None,
    max_tokens: Annotated[int, Option(min=1, help="of one answer")] = 1024,
    seed: Annotated[int | None, Option(help="the same seed gives the same answers")] = None,
) -> None:
    """Talk to a model: an answer appears as it is written. Lines may come from a pipe."""
    name = served_model(url, api_key, model)
    options: dict[str, Any] = {"model": name, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    given = {key: value for key, value in options.items() if value is not None}
    opening: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    messages = list(opening)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        report(f"{name} at {url}; {_HELP}")
    with OpenAI(base_url=url, api_key=api_key) as client:
        while (text := _read(is_terminal)) is not None:
            if text == "/new":
                messages = list(opening)
            elif text.strip():
                messages += [{"role": "user", "content": text}]
                answer = _answer(client, messages, given, is_terminal)
                messages = messages[:-1] if answer is None else [*messages, {"role": "assistant", "content": answer}]


def _read(is_terminal: bool) -> str | None:
    """Return the next line; None at the end."""
    try:
        return console.input("[bold]> [/bold]") if is_terminal else input()
    except (EOFError, KeyboardInterrupt):
        return None


def _answer(client: OpenAI, messages: list[Any], options: dict[str, Any], is_terminal: bool) -> str | None:
    """Print an answer as it comes and return it; None if the server refuses."""
    began_s, pieces, num_tokens = time.monotonic(), [], 0
    create: Any = client.chat.completions.create  # its overloads know no dictionaries
    try:
        stream = create(messages=messages, stream=True, stream_options={"include_usage": True}, **options)
        with stream:
            for chunk in stream:
                if chunk.choices and (piece := chunk.choices[0].delta.content):
                    pieces.append(piece)
                    print(piece, end="", flush=True)
                if chunk.usage is not None:
                    num_tokens = chunk.usage.completion_tokens
    except KeyboardInterrupt:
        pass  # what was said stands
    except OpenAIError as error:
        report_error(error)
        return None
    print()
    if is_terminal and num_tokens:
        lasted_s = time.monotonic() - began_s
        console.print(f"[dim]{num_tokens} tokens, {num_tokens / lasted_s:.0f} per second[/dim]")
    return "".join(pieces)
