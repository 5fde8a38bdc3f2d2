"""`outrider chat`: a conversation in the terminal with any OpenAI server."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer
from openai import OpenAI
from typer import Option

from cluster.cli import console, report, report_error
from cluster.cli.server import API_KEY, URL, AnswerError, ApiKey, ServerUrl, finite, served_model, understood

_HELP = "Ctrl-D quits, Ctrl-C stops an answer, /new starts a new conversation"


def chat(
    url: ServerUrl = URL,
    model: Annotated[str | None, Option(help="default: the first model of the server")] = None,
    api_key: ApiKey = API_KEY,
    system: Annotated[str | None, Option(help="the system message")] = None,
    temperature: Annotated[float | None, Option(min=0.0, callback=finite, help="default: the server's")] = None,
    max_tokens: Annotated[int, Option(min=1, help="maximum length of an answer")] = 1024,
    seed: Annotated[int | None, Option(help="the same seed gives the same answers")] = None,
) -> None:
    """Chat with a model; answers are streamed. Input may come from a pipe; exits with 1 if an answer failed."""
    name = served_model(url, api_key, model)
    options: dict[str, Any] = {"model": name, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    given = {key: value for key, value in options.items() if value is not None}
    opening: list[dict[str, str]] = [] if system is None else [{"role": "system", "content": system}]
    messages, has_failed = list(opening), False
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
                has_failed |= answer is None
    if has_failed and not is_terminal:
        raise typer.Exit(1)


def _read(is_terminal: bool) -> str | None:
    """Return the next line, or None at the end."""
    try:
        return console.input("[bold]> [/bold]") if is_terminal else input()
    except (EOFError, KeyboardInterrupt):
        return None


def _answer(client: OpenAI, messages: list[Any], options: dict[str, Any], is_terminal: bool) -> str | None:
    """Print an answer as it arrives and return it, or None if the server refuses or the stream breaks off."""
    began_s = time.monotonic()
    pieces: list[str] = []
    num_tokens = 0
    create: Any = client.chat.completions.create  # its overloads accept no dictionaries
    try:
        with (
            understood(),
            create(messages=messages, stream=True, stream_options={"include_usage": True}, **options) as stream,
        ):
            num_tokens = _print_stream(stream, pieces)
    except KeyboardInterrupt:
        pass  # the partial answer is kept
    except AnswerError as error:
        report_error(error)
        return None
    print()
    if is_terminal and num_tokens:
        lasted_s = time.monotonic() - began_s
        console.print(f"[dim]{num_tokens} tokens, {num_tokens / lasted_s:.0f} per second[/dim]")
    return "".join(pieces)


def _print_stream(stream: Any, pieces: list[str]) -> int:
    """Print an answer as it arrives, add its text to `pieces`, and return its number of tokens, 0 if unknown.

    Raises:
        AnswerError: the answer breaks off, or has no text.
    """
    num_tokens, is_finished = 0, False
    for chunk in stream:
        if chunk.choices and (piece := chunk.choices[0].delta.content):
            sys.stdout.write(piece)
            sys.stdout.flush()
            pieces.append(piece)
        is_finished |= any(choice.finish_reason for choice in chunk.choices or ())
        if chunk.usage is not None:
            num_tokens = int(chunk.usage.completion_tokens or 0)
    if not is_finished:
        raise AnswerError("the answer broke off")
    if not pieces:
        raise AnswerError("an answer without text")
    return num_tokens
