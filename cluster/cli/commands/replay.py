"""`outrider replay`: runs stored requests again and compares their tokens."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from openai import OpenAI
from typer import Argument, Option

from cluster.cli.console import report
from cluster.cli.server import API_KEY, URL, AnswerError, ServerUrl, served_model, understood
from protos.errors import ConfigError
from protos.fingerprint import read_fingerprint

_PATHS = {"text_completion": "/completions", "chat.completion": "/chat/completions"}
_FORM = 'each record is an object with "request", the request body, and "response", the answer'


@dataclass(frozen=True, slots=True)
class Record:
    """A request and its answer, and their place in the file."""

    place: str
    request: dict[str, Any]
    response: dict[str, Any]

    @property
    def path(self) -> str:
        """The endpoint that answered."""
        kind = self.response.get("object")
        if not isinstance(kind, str) or kind not in _PATHS or not isinstance(self.response.get("choices"), list):
            raise ConfigError(
                f"{self.place}: response.object is {kind!r}; it must be {' or '.join(_PATHS)}, not a stream"
            )
        return _PATHS[kind]


def replay(
    file: Annotated[str, Argument(metavar="FILE", help="JSON or JSON lines; - reads standard input")],
    url: ServerUrl = URL,
    api_key: Annotated[str, Option(envvar="OPENAI_API_KEY", help="key of the server")] = API_KEY,
) -> None:
    """Run stored requests again and compare their tokens; report differences, and exit with 1 if there are any."""
    records = read_records(file)
    served_model(url, api_key, None)
    with OpenAI(base_url=url, api_key=api_key, max_retries=0) as client:
        same = [_replay(client, record) for record in records]
    report(f"{sum(same)} of {len(same)} the same")
    if not all(same):
        raise typer.Exit(1)


def read_records(file: str) -> list[Record]:
    """Return the records of a JSON or JSON lines file.

    Raises:
        ConfigError: it cannot be read, has no records, or a record cannot be reproduced.
    """
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        values = list(_values(text))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; give JSON or JSON lines, where {_FORM}") from None
    records = [_record(value, f"{file}, record {rank}") for rank, value in enumerate(values, 1)]
    if not records:
        raise ConfigError(f"{file} holds no records; {_FORM}")
    return records


def _values(text: str) -> Iterator[Any]:
    try:
        whole = json.loads(text)
    except ValueError:
        yield from (json.loads(line) for line in text.splitlines() if line.strip())
        return
    yield from whole if isinstance(whole, list) else [whole]


def _record(value: Any, place: str) -> Record:
    match value:
        case {"request": dict(request), "response": dict(response)}:
            pass
        case _:
            raise ConfigError(f"{place}: {_FORM}")
    if request.get("seed") is None and request.get("temperature") != 0:
        raise ConfigError(f"{place}: request has no seed and temperature is not 0, so its tokens cannot be reproduced")
    record = Record(place, request, response)
    record.path  # noqa: B018  # refused before anything is sent
    return record


def _replay(client: OpenAI, record: Record) -> bool:
    """Run one record again, report on it, and return True if its tokens are the same."""
    body = {name: value for name, value in record.request.items() if name not in ("stream", "stream_options")}
    try:
        with understood("the record"):
            json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
            list(changed_choices(record.response, record.response))
            list(changed_digests(record.response, record.response))
        with understood():
            answer: Any = client.post(record.path, cast_to=object, body={**body, "return_token_ids": True})
            changes = list(changed_choices(record.response, answer))
            causes = list(changed_digests(record.response, answer))
            num_tokens = answer["usage"]["completion_tokens"]
    except AnswerError as error:
        report(_printable(f"{record.place}: {error}"))
        return False
    if not changes:
        what = "tokens" if all("token_ids" in choice for choice in record.response["choices"]) else "texts"
        report(f"{record.place}: the same {what}, {num_tokens} tokens")
    for change in changes:
        report(f"{record.place}: {change}")
    for cause in causes:
        report(_printable(f"    {cause}"))
    if changes and not causes:
        report("    no digest has changed: rounding decided a near tie; target.deterministic: true prevents that")
    return not changes


def _printable(text: str) -> str:
    """Escape lone surrogates: JSON can hold them, a terminal cannot."""
    return text.encode(errors="backslashreplace").decode()


def changed_choices(stored: dict[str, Any], answer: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each choice that differs, compared by tokens if they are stored, else by text."""
    if len(stored["choices"]) != len(answer["choices"]):
        yield f"{len(answer['choices'])} choices, where there were {len(stored['choices'])}"
        return
    by_index = {choice["index"]: choice for choice in answer["choices"]}
    for choice in stored["choices"]:
        was, now = _said(choice, by_index[choice["index"]])
        if was != now:
            rank = next((rank for rank, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), None)
            where = min(len(was), len(now)) if rank is None else rank
            yield f"choice {choice['index']} differs from {where} on: {_at(was, where)} was, {_at(now, where)} is"


def _said(stored: dict[str, Any], now: dict[str, Any]) -> tuple[Any, Any]:
    if "token_ids" in stored:
        return stored["token_ids"], now["token_ids"]
    return _text(stored), _text(now)


def _text(choice: dict[str, Any]) -> str:
    message = choice.get("message", {"content": choice.get("text")})
    return (message.get("content") or "") + json.dumps(
        [call["function"] for call in message.get("tool_calls") or []], sort_keys=True
    )


def _at(said: Any, rank: int) -> str:
    return repr(said[rank]) if rank < len(said) else "the end"


def changed_digests(stored: dict[str, Any], answer: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each digest that differs: the deployment's parts, and the request's tokens."""
    was, now = str(stored.get("system_fingerprint")), str(answer.get("system_fingerprint"))
    old, new = read_fingerprint(was), read_fingerprint(now)
    if old is None or new is None:
        if was != now:
            yield f"system_fingerprint differs: {was} was, {now} is"
    else:
        yield from (f"{part} differ: {old[part]} was, {new[part]} is" for part in old if old[part] != new[part])
    if list(_prompts(stored)) != list(_prompts(answer)) and any(prompt is not None for prompt in _prompts(stored)):
        yield "request differs: its prompt has other tokens, by the template, the tokenizer or another body"
    elif (count := _num_prompt_tokens(stored)) not in (None, now_count := _num_prompt_tokens(answer)):
        yield f"request differs: its prompt had {count} tokens and has {now_count}"


def _num_prompt_tokens(answer: dict[str, Any]) -> int | None:
    return (answer.get("usage") or {}).get("prompt_tokens")


def _prompts(answer: dict[str, Any]) -> Iterable[Any]:
    return [answer.get("prompt_token_ids"), *(choice.get("prompt_token_ids") for choice in answer["choices"])]
