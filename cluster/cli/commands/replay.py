"""`outrider replay`: runs stored requests again, compares their tokens, and checks their receipts."""

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

from cluster.cli import report
from cluster.cli.server import API_KEY, URL, AnswerError, ApiKey, ServerUrl, served_model, understood
from protos.errors import ConfigError
from protos.served_model import read_fingerprint
from router.generation.receipts import Receipt, check_receipt, digest_of_ids, read_public_key, read_receipt

_PATHS = {"text_completion": "/completions", "chat.completion": "/chat/completions"}
_PARTS = ("weights", "draft", "kernels", "settings", "tokenizer", "template", "sampling")
_FORM = 'each record is an object with "request", the request body, and "response", the answer'


@dataclass(frozen=True, slots=True)
class Record:
    """A request and its answer, their place in the file, and the endpoint that answered."""

    place: str
    request: dict[str, Any]
    response: dict[str, Any]
    path: str
    receipt: Receipt | None = None

    @property
    def body(self) -> dict[str, Any]:
        """The request to send: not streamed, with the seed of the receipt and a receipt of its own."""
        body = {name: value for name, value in self.request.items() if name not in ("stream", "stream_options")}
        signed = {} if self.receipt is None else {"seed": self.receipt.seed, "receipt": True}
        return {**body, "return_token_ids": True, **signed}


def replay(
    file: Annotated[str, Argument(metavar="FILE", help="JSON or JSON lines; - reads standard input")],
    url: ServerUrl = URL,
    api_key: ApiKey = API_KEY,
    receipt_key: Annotated[
        str | None, Option(metavar="FILE", help="public key (PEM) that must have signed every receipt")
    ] = None,
) -> None:
    """Run stored requests again and compare their tokens; report differences, and exit with 1 if there are any."""
    records = read_records(file)
    signer = None if receipt_key is None else read_public_key(receipt_key)
    if signer is None and (keys := sorted({each.receipt.public_key for each in records if each.receipt})):
        report(f"receipts are checked against the key that each names, {', '.join(keys)}; --receipt-key FILE checks it")
    served_model(url, api_key, None)
    with OpenAI(base_url=url, api_key=api_key, max_retries=0) as client:
        same = [_replay(client, record, signer) for record in records]
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
    try:
        receipt = None if response.get("receipt") is None else read_receipt(response["receipt"])
    except ConfigError as error:
        raise ConfigError(f"{place}: {error}") from None
    if receipt is None and request.get("seed") is None and request.get("temperature") != 0:
        raise ConfigError(f"{place}: request has no seed and temperature is not 0, so its tokens cannot be reproduced")
    kind = response.get("object")
    if not isinstance(kind, str) or kind not in _PATHS or not isinstance(response.get("choices"), list):
        raise ConfigError(f"{place}: response.object is {kind!r}; it must be {' or '.join(_PATHS)}, not a stream")
    return Record(place, request, response, _PATHS[kind], receipt)


def faults_of(record: Record, signer: str | None) -> Iterator[str]:
    """Yield a line for each reason why a record's receipt does not prove its answer; `signer` is the expected key."""
    receipt = record.receipt
    if receipt is None:
        if signer is not None:
            yield "the answer has no receipt"
        return
    if not check_receipt(receipt):
        yield "the receipt is not what its key has signed"
    if signer not in (None, receipt.public_key):
        yield f"the receipt is signed by another key, {receipt.public_key}"
    answered = {choice["index"]: choice.get("token_ids") for choice in record.response["choices"]}
    if answered.keys() != {choice.index for choice in receipt.choices}:
        yield "the receipt is of other choices than the answer"
    for choice in receipt.choices:
        if (ids := answered.get(choice.index)) is not None and digest_of_ids(ids) != choice.tokens:
            yield f"the receipt has other tokens than choice {choice.index}"


def changed_parts(was: Receipt, now: Receipt) -> Iterator[str]:
    """Yield a line for each digest of a receipt that differs, the tokens' last."""
    for part in _PARTS:
        old, new = getattr(was, part), getattr(now, part)
        if old != new:
            yield f"{part} differ: was {old}, is {new}"
    for old_choice, new_choice in zip(was.choices, now.choices, strict=False):
        for part in ("prompt", "tokens"):
            old, new = getattr(old_choice, part), getattr(new_choice, part)
            if old != new:
                yield f"{part} of choice {old_choice.index} differ: was {old}, is {new}"


def _replay(client: OpenAI, record: Record, signer: str | None) -> bool:
    """Run one record again, report on it, and return True if its tokens are the same and its receipt is right."""
    body = record.body
    try:
        # Compare the record with itself first: a malformed one fails before a request is sent.
        with understood("the record"):
            json.dumps(body, ensure_ascii=False, allow_nan=False).encode()
            list(changed_choices(record.response, record.response))
            list(changed_digests(record.response, record.response))
            faults = list(faults_of(record, signer))
        with understood():
            answer: Any = client.post(record.path, cast_to=object, body=body)
            changes = list(changed_choices(record.response, answer))
            causes = list(changed_digests(record.response, answer))
            if record.receipt is not None:
                causes = list(changed_parts(record.receipt, now := read_receipt(answer["receipt"])))
                changes = changes or _changed_tokens(record.receipt, now)
            num_tokens = answer["usage"]["completion_tokens"]
    except (AnswerError, ConfigError) as error:
        report(_printable(f"{record.place}: {error}"))
        return False
    # Report what differs, then the digests that explain it.
    for fault in faults:
        report(_printable(f"{record.place}: {fault}"))
    if not changes:
        has_ids = record.receipt or all("token_ids" in choice for choice in record.response["choices"])
        what = "tokens" if has_ids else "texts"
        report(f"{record.place}: the same {what}, {num_tokens} tokens")
    for change in changes:
        report(f"{record.place}: {change}")
    for cause in causes:
        report(_printable(f"    {cause}"))
    if changes and not causes:
        report("    no digest has changed: rounding decided a near tie; target.deterministic: true prevents that")
    return not changes and not faults


def _changed_tokens(was: Receipt, now: Receipt) -> list[str]:
    same = [choice.tokens for choice in was.choices] == [choice.tokens for choice in now.choices]
    return [] if same else ["the tokens differ from the receipt's"]


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
        was, now = _compared(choice, by_index[choice["index"]])
        if was != now:
            rank = next((rank for rank, (a, b) in enumerate(zip(was, now, strict=False)) if a != b), None)
            where = min(len(was), len(now)) if rank is None else rank
            yield f"choice {choice['index']} differs from {where} on: was {_at(was, where)}, is {_at(now, where)}"


def _compared(stored: dict[str, Any], now: dict[str, Any]) -> tuple[Any, Any]:
    if "token_ids" in stored:
        return stored["token_ids"], now["token_ids"]
    return _text(stored), _text(now)


def _text(choice: dict[str, Any]) -> str:
    message = choice.get("message", {"content": choice.get("text")})
    return (message.get("content") or "") + json.dumps(
        [call["function"] for call in message.get("tool_calls") or []], sort_keys=True
    )


def _at(values: Any, rank: int) -> str:
    return repr(values[rank]) if rank < len(values) else "the end"


def changed_digests(stored: dict[str, Any], answer: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each digest that differs: the deployment's parts, and the request's tokens."""
    was, now = str(stored.get("system_fingerprint")), str(answer.get("system_fingerprint"))
    old, new = read_fingerprint(was), read_fingerprint(now)
    if old is None or new is None:
        if was != now:
            yield f"system_fingerprint differs: was {was}, is {now}"
    else:
        yield from (f"{part} differ: was {old[part]}, is {new[part]}" for part in old if old[part] != new[part])
    if list(_prompts(stored)) != list(_prompts(answer)) and any(prompt is not None for prompt in _prompts(stored)):
        yield "request differs: its prompt has other tokens, by the template, the tokenizer or another body"
    elif (count := _num_prompt_tokens(stored)) not in (None, now_count := _num_prompt_tokens(answer)):
        yield f"request differs: its prompt had {count} tokens and has {now_count}"


def _num_prompt_tokens(answer: dict[str, Any]) -> int | None:
    return (answer.get("usage") or {}).get("prompt_tokens")


def _prompts(answer: dict[str, Any]) -> Iterable[Any]:
    return [answer.get("prompt_token_ids"), *(choice.get("prompt_token_ids") for choice in answer["choices"])]
