"""A server under audit: its requests within a budget, and its answers in one form.

Whatever a server sends, a call returns an `Answer` or raises `NoVerdictError` with a sentence.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from cluster.cli.audit.evidence import NUM_CELLS, Prediction
from cluster.cli.audit.wire import (
    TIMEOUT_S,
    Answer,
    Body,
    Choice,
    NoVerdictError,
    RefusedError,
    Request,
    choices_in,
    events,
    fetch,
    message_of,
    open_answer,
    retry_after,
    whole,
)
from cluster.cli.server import NOT_UNDERSTOOD

COMPLETIONS, CHAT = "/completions", "/chat/completions"

_BUSY = (429, 503)
_NO_ENDPOINT = (404, 405, 501)
_WHOLE_WORD = re.compile(r" \w+")  # merges do not cross its space
# Servers apply defaults of their own (a top_k of 40, a checkpoint's top_p), so each is switched off by name;
# llama.cpp has `repeat_penalty`. What a server refuses is left out. A seed is drawn for each request.
_OPTIONAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_OPTIONAL |= {"repetition_penalty": 1.0, "repeat_penalty": 1.0, "return_token_ids": True, "seed": 1}


def seeds_from(start: int) -> Iterator[int]:
    """Return seeds far apart, one for each request.

    Servers add the index of a choice to the seed (vLLM does), and equal draws would count twice.
    """
    return itertools.count(start, 4096)


@dataclass(slots=True)
class RequestBudget:
    """Requests and seconds left, shared by all servers of an audit."""

    max_requests: int
    until_s: float
    num_requests: int = 0
    num_failures: int = 0

    @property
    def end(self) -> str:
        """A sentence if there is no request or no time left, or the server is gone; else empty."""
        if self.num_failures >= 3:  # in a row: the server is taken for gone
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
    budget: RequestBudget
    is_chat: bool = False
    num_top: int = 0  # alternatives per token that it reports
    max_choices: int = 1
    extra: Body = field(default_factory=dict)  # of every request: speculation off, for example
    neutral: Body = field(default_factory=dict)  # the optional fields that it takes
    names: set[str] = field(default_factory=set)  # of models, in answers
    prompts: dict[str, tuple[list[int], int | None]] = field(default_factory=dict)  # ids if they are shown, length
    seeds: Iterator[int] = field(default_factory=lambda: seeds_from(1))

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
        seed = {"seed": next(self.seeds)} if "seed" in self.neutral else {}
        body = {"model": self.model, **body, "temperature": 1.0, **self.neutral, **seed, **self.extra, **fields}
        return {name: value for name, value in body.items() if value is not None}

    def request(self, body: Body) -> Request:
        """Return a body as a request of its usual endpoint."""
        return Request(f"{self.url}{CHAT if self.is_chat else COMPLETIONS}", body)

    async def ask(self, prompt: str | Sequence[int], **fields: Any) -> Answer:
        """Send a prompt to the endpoint of texts, else as a chat."""
        return await self.post(CHAT if self.is_chat else COMPLETIONS, self.body(prompt, **fields))

    async def predict(self, prompt: str | Sequence[int]) -> Prediction | None:
        """Return the reported distribution of the next token; ask up to four times if answers end without a token."""
        for _ in range(4):
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
            choices = choices_in(data, self.num_top)
        except NOT_UNDERSTOOD as error:
            raise NoVerdictError(f"an answer is not in OpenAI's form ({type(error).__name__}: {error})"[:300]) from None
        if not choices:
            raise NoVerdictError("an answer has no choices")
        self.names.add(str(data.get("model")))
        return Answer(request, choices, data)

    async def stream(self, body: Body) -> AsyncIterator[tuple[float, Body]]:
        """Yield the events of a streamed answer with their times."""
        self.budget.spend()
        url = f"{self.url}{CHAT if self.is_chat else COMPLETIONS}"
        async with open_answer(self.http, "POST", url, {**body, "stream": True}, self.left_s) as response:
            if response.status_code != 200:
                raise RefusedError(response.status_code, message_of(await whole(response)))
            async for event in events(response):
                yield event

    async def text_of(self, url: str) -> str | None:
        """Return a page of the server, None if there is no such page."""
        try:
            response = await fetch(self.http, "GET", url, None, self.left_s)
        except NoVerdictError:
            return None
        return response.text if response.status_code == 200 else None

    async def find_again(self) -> None:
        """Forget the failures so far if the server answers now."""
        with suppress(NoVerdictError):
            await fetch(self.http, "GET", f"{self.url}/models", None, min(10.0, self.left_s))
            self.budget.num_failures = 0

    @property
    def left_s(self) -> float:
        """The longest time of a request."""
        return max(1.0, min(TIMEOUT_S, self.budget.until_s - time.monotonic() + 1.0))

    async def _send(self, path: str, body: Body) -> httpx.Response:
        for wait in range(6):  # a server that limits the rate
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
                raise RefusedError(response.status_code, message_of(response))
            await asyncio.sleep(min(retry_after(response, 2.0**wait / 4), self.left_s, 20.0))
        raise NoVerdictError(f"the server limits the rate: status {response.status_code} 6 times in a row")


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
    """Find the endpoint, with all optional fields or else with each one that it does not refuse."""
    refusals: list[RefusedError] = []
    for server.is_chat, server.neutral in itertools.product((False, True), (_OPTIONAL, {})):
        try:
            await server.ask(prompt, max_tokens=1)
        except RefusedError as error:
            refusals.append(error)
            if error.status in (401, 403):
                raise
            continue
        for name, value in _OPTIONAL.items():
            if name in server.neutral:
                continue
            with suppress(RefusedError):
                await server.ask(prompt, max_tokens=1, **{name: value})
                server.neutral = {**server.neutral, name: value}
        return
    raise next((each for each in refusals if each.status not in _NO_ENDPOINT), refusals[0])
