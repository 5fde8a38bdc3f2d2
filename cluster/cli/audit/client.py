"""A server under audit: its requests within a budget, and its answers in one form.

Whatever a server sends, a call returns an `Answer` or raises `NoVerdictError` with a sentence.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from cluster.cli.audit.prediction import NUM_CELLS, Prediction
from protos.client_text import for_log

COMPLETIONS, CHAT = "/completions", "/chat/completions"
Body = dict[str, Any]

TIMEOUT_S = 60.0
_MAX_WAITS = 6  # for a server that limits the rate, each request
_MAX_WAIT_S = 20.0
_MAX_BYTES = 64 << 20  # of an answer
_MAX_ENDS = 4  # asks whose answers end without a token
_MAX_FAILURES = 3  # one after the other; then the server is taken for gone
_BUSY = (429, 503)
_NO_ENDPOINT = (404, 405, 501)
_ANY = 1000
_WHOLE_WORD = re.compile(r" \w+")  # merges do not cross its space
NOT_READABLE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
# Servers apply defaults of their own (a top_k of 40, a checkpoint's top_p), so each is switched off by name. What a
# server refuses is left out.
_OPTIONAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_OPTIONAL |= {"repetition_penalty": 1.0, "return_token_ids": True}
_NEUTRAL = {"temperature": 1.0, **_OPTIONAL}


class NoVerdictError(Exception):
    """A check cannot reach a verdict; the message is a sentence for the report."""


class RefusedError(NoVerdictError):
    """The server refuses a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"the server refuses with status {status}: {message}")
        self.status = status
        self.message = message


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


@dataclass(slots=True)
class Budget:
    """Requests and seconds left, shared by all servers of an audit."""

    max_requests: int
    until_s: float
    num_requests: int = 0
    num_failures: int = 0

    @property
    def end(self) -> str:
        """A sentence if there is no request or no time left, or the server is gone; else empty."""
        if self.num_failures >= _MAX_FAILURES:
            return f"the server has not answered {self.num_failures} requests in a row"
        if self.num_requests >= self.max_requests:
            return f"--requests {self.max_requests} are used up"
        return "--minutes are used up" if time.monotonic() >= self.until_s else ""

    def spend(self) -> None:
        """Count a request. Raises NoVerdictError if none is left."""
        if self.end:
            raise NoVerdictError(self.end)
        self.num_requests += 1


@dataclass(slots=True)
class Server:
    """A server, and its abilities as the first requests have shown them."""

    http: httpx.AsyncClient
    url: str
    model: str
    budget: Budget
    is_chat: bool = False
    num_top: int = 0  # alternatives per token that it reports
    max_choices: int = 1
    extra: Body = field(default_factory=dict)  # of every request: speculation off, for example
    neutral: Body = field(default_factory=lambda: dict(_NEUTRAL))
    has_seed: bool = True
    names: set[str] = field(default_factory=set)  # of models, in answers
    prompts: dict[str, tuple[list[int], int | None]] = field(default_factory=dict)  # ids if they are shown, length
    seeds: Any = field(default_factory=lambda: itertools.count(1))

    @property
    def width(self) -> int:
        """Requests at a time: some sixteen to sixty-four sequences."""
        return max(1, 16 // self.max_choices) if self.max_choices < 16 else 2

    @property
    def num_drawn(self) -> int:
        """Alternatives to ask for with draws: some more than there are cells."""
        return min(self.num_top, NUM_CELLS + 2)

    def body(self, prompt: str | Sequence[int], *, is_chat: bool | None = None, **fields: Any) -> Body:
        """Return a request's body: neutral sampling, a seed of its own, and `fields`, where None removes one."""
        if self.is_chat if is_chat is None else is_chat:
            body: Body = {"messages": [{"role": "user", "content": prompt}]}
            if fields.get("logprobs"):
                fields |= {"logprobs": True, "top_logprobs": fields["logprobs"]}
        else:
            body = {"prompt": prompt}
        seed = {"seed": next(self.seeds)} if self.has_seed else {}
        body = {"model": self.model, **body, **self.neutral, **seed, **self.extra, **fields}
        return {name: value for name, value in body.items() if value is not None}

    def request(self, body: Body) -> Request:
        """Return a body as a request of its usual endpoint."""
        return Request(f"{self.url}{CHAT if self.is_chat else COMPLETIONS}", body)

    async def ask(self, prompt: str | Sequence[int], **fields: Any) -> Answer:
        """Send a prompt to the endpoint of texts, else as a chat."""
        return await self.post(CHAT if self.is_chat else COMPLETIONS, self.body(prompt, **fields))

    async def predict(self, prompt: str | Sequence[int]) -> Prediction | None:
        """Return the reported distribution of the next token, asked again where the answer ends at once."""
        for _ in range(_MAX_ENDS):
            if (first := (await self.ask(prompt, max_tokens=1, logprobs=self.num_top)).first_prediction) is not None:
                return first
        return None

    async def forced(self, prompt: str, choice: Choice, number: int) -> Prediction | None:
        """Return the distribution after a prompt and the first tokens of a choice, given as a prompt.

        None if the tokens cannot be given: their ids are not shown, and their text may be read as other tokens.

        Raises:
            NoVerdictError: no prefix can be given.
        """
        if self.is_chat:
            raise NoVerdictError("without /v1/completions no prefix can be given")
        if prompt not in self.prompts:
            answer = await self.ask(prompt, max_tokens=1)
            ids = answer.data["choices"][0].get("prompt_token_ids") or answer.data.get("prompt_token_ids") or []
            self.prompts[prompt] = ids, answer.count("prompt_tokens")
        ids, length = self.prompts[prompt]
        if ids and len(choice.token_ids) >= number:
            return await self.predict([*ids, *choice.token_ids[:number]])
        tokens = choice.tokens[:number]
        if length is None or not all(map(_WHOLE_WORD.fullmatch, tokens)):
            return None
        text = prompt + "".join(tokens)
        if (await self.ask(text, max_tokens=1)).count("prompt_tokens") != length + number:
            return None
        return await self.predict(text)

    async def post(self, path: str, body: Body) -> Answer:
        """Send a body.

        Raises:
            RefusedError: the server refuses it.
            NoVerdictError: there is no answer that can be read, or the budget is used up.
        """
        response = await self._send(path, body)
        request = Request(f"{self.url}{path}", body)
        try:
            data = response.json()
            choices = tuple(_choice(each, self.num_top or _ANY) for each in data["choices"])
        except NOT_READABLE as error:
            raise NoVerdictError(f"an answer is not in OpenAI's form ({type(error).__name__}: {error})"[:300]) from None
        if not choices:
            raise NoVerdictError("an answer has no choices")
        self.names.add(str(data.get("model")))
        return Answer(request, choices, data)

    async def stream(self, body: Body) -> AsyncIterator[tuple[float, Body]]:
        """Yield the events of a streamed answer with their times."""
        self.budget.spend()
        path, rest = CHAT if self.is_chat else COMPLETIONS, b""
        async with _open(self.http, "POST", f"{self.url}{path}", {**body, "stream": True}, self.left_s) as response:
            if response.status_code != 200:
                raise RefusedError(response.status_code, _message(await _whole(response)))
            async for part in _parts(response):
                *lines, rest = (rest + part).split(b"\n")
                for data in (line.removeprefix(b"data:").strip() for line in lines if line.startswith(b"data:")):
                    if data != b"[DONE]":
                        yield time.monotonic(), _event(data)

    async def text_of(self, url: str) -> str | None:
        """Return a page of the server, None if there is no such page."""
        try:
            response = await fetch(self.http, "GET", url, None, self.left_s)
        except NoVerdictError:
            return None
        return response.text if response.status_code == 200 else None

    @property
    def left_s(self) -> float:
        """The longest time of a request."""
        return max(1.0, min(TIMEOUT_S, self.budget.until_s - time.monotonic() + 1.0))

    async def _send(self, path: str, body: Body) -> httpx.Response:
        for wait in range(_MAX_WAITS):
            self.budget.spend()
            try:
                response = await fetch(self.http, "POST", f"{self.url}{path}", body, self.left_s)
            except NoVerdictError:
                self.budget.num_failures += 1
                raise
            self.budget.num_failures = 0
            if response.status_code == 200:
                return response
            if response.status_code not in _BUSY:
                raise RefusedError(response.status_code, _message(response))
            await asyncio.sleep(min(_retry_after(response, 2.0**wait / 4), self.left_s, _MAX_WAIT_S))
        raise NoVerdictError(f"the server limits the rate: status {response.status_code} {_MAX_WAITS} times in a row")


async def fetch(http: httpx.AsyncClient, method: str, url: str, body: Any, timeout_s: float) -> httpx.Response:
    """Return a whole answer.

    Raises:
        NoVerdictError: it is late, broken or too long.
    """
    async with _open(http, method, url, body, timeout_s) as response:
        return await _whole(response)


@asynccontextmanager
async def _open(
    http: httpx.AsyncClient, method: str, url: str, body: Any, timeout_s: float
) -> AsyncIterator[httpx.Response]:
    """Open an answer that must end in time, however slowly its bytes come."""
    try:
        async with asyncio.timeout(timeout_s), http.stream(method, url, json=body, timeout=timeout_s) as response:
            yield response
    except (TimeoutError, httpx.TimeoutException):
        raise NoVerdictError(f"the server does not answer (no whole answer within {timeout_s:.0f} s)") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise NoVerdictError(f"the server does not answer ({error or type(error).__name__})") from None


async def _parts(response: httpx.Response) -> AsyncIterator[bytes]:
    size = 0
    async for part in response.aiter_bytes():
        size += len(part)
        if size > _MAX_BYTES:
            raise NoVerdictError(f"an answer is longer than {_MAX_BYTES >> 20} MiB")
        yield part


async def _whole(response: httpx.Response) -> httpx.Response:
    headers = {"retry-after": response.headers.get("retry-after", "")}
    return httpx.Response(
        response.status_code, headers=headers, content=b"".join([each async for each in _parts(response)])
    )


def _event(data: bytes) -> Body:
    try:
        event = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise NoVerdictError(f"a stream has an event that is not JSON ({error})"[:300]) from None
    if not isinstance(event, dict):
        raise NoVerdictError(f"a stream has the event {data[:60]!r}")
    return event


async def explore(server: Server, prompt: str) -> None:
    """Find out which endpoint, parameters, logprobs and number of choices a server accepts.

    Raises:
        NoVerdictError: it answers no request.
    """
    await _find_endpoint(server, prompt)
    for number in (20, 10, 5):
        try:
            answer = await server.ask(prompt, max_tokens=1, temperature=0.0, logprobs=number)
        except RefusedError:
            continue
        server.num_top = max((len(each.tokens) for each in answer.choices[0].predictions), default=0)
        break
    for number in (64, 16, 4):
        try:
            answer = await server.ask(prompt, max_tokens=8, n=number)
        except RefusedError:
            continue
        texts = {choice.text for choice in answer.choices}
        if len(answer.choices) == number and len(texts) > 1:
            server.max_choices = number
            break


async def _find_endpoint(server: Server, prompt: str) -> None:
    """Find the endpoint, with all optional fields or with those that it does not refuse."""
    refusals: list[RefusedError] = []
    for is_chat, is_whole in itertools.product((False, True), (True, False)):
        server.is_chat, server.has_seed = is_chat, is_whole
        server.neutral = dict(_NEUTRAL) if is_whole else {"temperature": 1.0}
        try:
            await server.ask(prompt, max_tokens=1)
        except RefusedError as error:
            refusals.append(error)
            if error.status in (401, 403):
                raise
        else:
            await _put_back(server, prompt)
            return
    raise next((each for each in refusals if each.status not in _NO_ENDPOINT), refusals[0])


async def _put_back(server: Server, prompt: str) -> None:
    """Send again each field that was left out, and keep those that the server takes."""
    for name, value in {"seed": 1, **_OPTIONAL}.items():
        if name in server.neutral or (name == "seed" and server.has_seed):
            continue
        try:
            await server.ask(prompt, max_tokens=1, **{name: value})
        except RefusedError:
            continue
        if name == "seed":
            server.has_seed = True
        else:
            server.neutral[name] = value


def choices_of(response: httpx.Response) -> tuple[Choice, ...]:
    """Return the choices of an answer; empty if it has none that can be read."""
    try:
        return tuple(_choice(each, _ANY) for each in response.json()["choices"])
    except NOT_READABLE:
        return ()


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


def _message(response: httpx.Response) -> str:
    try:
        error = response.json()
        error = error.get("error", error)
        text = error.get("message") if isinstance(error, dict) else error
    except (ValueError, AttributeError):
        text = response.text
    return for_log(" ".join(str(text).split())) or "no reason given"


def _retry_after(response: httpx.Response, default_s: float) -> float:
    try:
        return max(0.05, float(response.headers["retry-after"]))
    except (KeyError, ValueError):
        return default_s
