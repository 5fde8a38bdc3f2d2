"""One client request in flight: its choices, each a stream of deltas, and the tokens they cost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from protos.errors import GrammarError
from protos.messages import (
    FinishReason,
    GenerateRequest,
    SpeculationExplanation,
    SpeculationStats,
    StepStats,
    TokenChunk,
    TokenSource,
)
from protos.predicted_text import PredictedText, Prediction
from router.api_keys import current_client
from router.backend import OpenStream
from router.generation.choice_text import ChoiceText, DetokenizerMaker
from router.generation.delta import Delta, join_deltas, runs_of
from router.generation.receipts import OpenReceipt, Receipt
from router.generation.tool_calls import ToolCallParser
from router.generation.tool_formats.tool_format import ToolFormat
from router.metrics.ingress_metrics import IngressMetrics, TokenClock
from router.requests.sampling_params import GenerateParams
from router.tokenizer import Tokenizer, make_detokenizer

if TYPE_CHECKING:
    from router.generation.response_template import ResponseReader

Item = TypeVar("Item")


async def fan_in(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Yield the items of all streams as they come. The first error ends all of them; closing closes all of them."""
    # A client that reads slowly holds the streams back, not the memory.
    queue: asyncio.Queue[Item | Exception | None] = asyncio.Queue(64)  # None or an error ends a stream
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    num_open = len(tasks)
    try:
        while num_open:
            received = await queue.get()
            if isinstance(received, Exception):
                raise received
            if received is None:
                num_open -= 1
            else:
                yield received
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def leading(stream: AsyncGenerator[Item, None], has_begun: asyncio.Event) -> AsyncGenerator[Item, None]:
    """Yield the items of a stream, and set the event at the first."""
    async with aclosing(stream):
        async for item in stream:
            has_begun.set()
            yield item


async def following(stream: AsyncGenerator[Item, None], may_begin: asyncio.Event) -> AsyncGenerator[Item, None]:
    """Yield the items of a stream that begins at the event."""
    async with aclosing(stream):
        await may_begin.wait()
        async for item in stream:
            yield item


async def _pump(stream: AsyncGenerator[Item, None], queue: asyncio.Queue[Item | Exception | None]) -> None:
    async with aclosing(stream):
        try:
            async for item in stream:
                await queue.put(item)
        except Exception as error:  # the reader raises it
            await queue.put(error)
        else:
            await queue.put(None)


def _fed(text: ChoiceText, batch: Sequence[TokenChunk]) -> list[Delta]:
    """Return the deltas of a batch, up to the end of the text."""
    chunks = batch if text.thinks_once else [each for chunk in batch for each in _one_by_one(chunk)]
    return [text.feed(chunk) for chunk in chunks if not text.is_finished]


def _one_by_one(chunk: TokenChunk) -> Iterator[TokenChunk]:
    """Yield a chunk for each token; what belongs to the whole chunk goes with the last one."""
    for rank in range(len(chunk.token_ids) - 1):
        one = slice(rank, rank + 1)
        yield TokenChunk(
            chunk.request_id, chunk.token_ids[one], logprobs=chunk.logprobs[one], sources=chunk.sources[one]
        )
    yield replace(chunk, token_ids=chunk.token_ids[-1:], logprobs=chunk.logprobs[-1:], sources=chunk.sources[-1:])


def echo_delta(index: int, request: GenerateRequest, params: GenerateParams, tokenizer: Tokenizer) -> Delta:
    """Return the prompt as the first delta of the answer."""
    prompt = params.prompts[index // params.num_choices_per_prompt]
    sent = prompt.text if len(prompt.token_ids) == len(request.prompt_token_ids) else ""
    is_skipping = params.fields.skip_special_tokens is not False
    detokenizer = make_detokenizer(tokenizer, (), skip_special_tokens=is_skipping)
    offsets, pieces = [], [""]
    num_characters = 0
    for token_id in request.prompt_token_ids:
        offsets.append(num_characters)
        pieces.append(detokenizer.push(token_id))
        if sent and tokenizer.is_special(token_id):  # the client's text has its name, or the tokenizer has added it
            name = tokenizer.token_text(token_id)
            pieces[-1] = name if sent.startswith(name, num_characters) else ""
        num_characters += len(pieces[-1])
    decoded = "".join(pieces) + detokenizer.flush()
    return Delta(
        index=index,
        text=sent or decoded,
        token_ids=request.prompt_token_ids,
        text_offsets=tuple(offsets) if params.num_logprobs is not None else (),
        sources=(TokenSource.PROMPT.value,) * len(offsets) if params.fields.return_token_sources else (),
    )


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one client request; a prompt with several choices counts once.

    Tokens of a prediction are accepted if the output has them. `speculation` is None while no choice has reported it,
    `steps` wherever the output is exact, `explanation` where the client has not asked for it.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    speculation: SpeculationStats | None = None
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    steps: StepStats | None = None
    explanation: SpeculationExplanation | None = None
    reasoning_tokens: int = 0


class UsageMeter:
    """Sums of deltas and chunks as they come."""

    def __init__(self, requests: Sequence[GenerateRequest], num_choices_per_prompt: int) -> None:
        self._firsts = range(0, len(requests), num_choices_per_prompt)  # each prompt is counted at its first choice
        self._num_prompt_tokens = sum(len(requests[index].prompt_token_ids) for index in self._firsts)
        self._num_cached = [0] * len(requests)
        self._num_generated = [0] * len(requests)
        self._num_reasoning = 0
        self._speculation: list[SpeculationStats | None] = [None] * len(requests)
        self._explanations: list[SpeculationExplanation | None] = [None] * len(requests)
        self.steps = StepStats() if any(request.speculation.is_approximate for request in requests) else None
        self._prediction = Prediction(requests[0].prediction_token_ids if requests else ())
        self._predicted = [PredictedText(self._prediction) for _ in requests if len(self._prediction)]

    def record(self, index: int, gained: Sequence[Delta], batch: Sequence[TokenChunk]) -> None:
        """Count what choice `index` gained from `batch`."""
        self._num_generated[index] += sum(len(delta.token_ids) for delta in gained)
        self._num_reasoning += sum(delta.num_reasoning_tokens for delta in gained)
        for delta in gained if self._predicted else ():
            self._predicted[index].read(delta.token_ids)
        for chunk in batch:
            self._num_cached[index] = max(self._num_cached[index], chunk.num_cached_tokens)
            self._speculation[index] = chunk.speculation or self._speculation[index]
            self._explanations[index] = chunk.explanation or self._explanations[index]
            if self.steps is not None:  # such a request has one choice
                self.steps = chunk.steps or self.steps

    def usage(self) -> Usage:
        """Return the sums so far."""
        explained = [each for each in self._explanations if each is not None]
        known = [stats for stats in self._speculation if stats is not None]
        num_predicted = len(self._predicted) * len(self._prediction)  # each choice had the whole prediction to repeat
        num_accepted = sum(text.num_matched for text in self._predicted)
        return Usage(
            prompt_tokens=self._num_prompt_tokens,
            completion_tokens=sum(self._num_generated),
            cached_tokens=sum(self._num_cached[index] for index in self._firsts),
            speculation=sum(known, SpeculationStats()) if known else None,
            accepted_prediction_tokens=num_accepted,
            rejected_prediction_tokens=num_predicted - num_accepted,
            steps=self.steps,
            explanation=sum(explained, SpeculationExplanation()) if explained else None,
            reasoning_tokens=self._num_reasoning,
        )


class Generation:
    """The choices of one client request: run once, read as deltas or in full."""

    def __init__(
        self,
        params: GenerateParams,
        requests: list[GenerateRequest],
        *,
        open_stream: OpenStream,
        tokenizer: Tokenizer,
        metrics: IngressMetrics,
        system_fingerprint: str,
        receipt: OpenReceipt | None = None,
        answers: ToolFormat | Callable[[str, Mapping[str, object]], ResponseReader] | None = None,
    ) -> None:
        """`answers` is the format of the model's calls, or makes a reader of its whole answers."""
        self.id = params.request_id
        self.fields = params.fields
        self.model_id = params.model_id
        self.num_choices = len(requests)
        self.system_fingerprint = system_fingerprint
        self.created_s = int(time.time())
        self._params = params
        self._receipt = receipt
        self._requests = requests
        self._open_stream = open_stream
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._tool_format = answers if isinstance(answers, ToolFormat) else None
        self._make_reader = None if isinstance(answers, ToolFormat) or not params.is_chat else answers
        self._tenant, self._route = current_client.get().tenant, "chat" if params.is_chat else "completion"
        self._meter = UsageMeter(requests, params.num_choices_per_prompt)

    @property
    def usage(self) -> Usage:
        """Tokens counted so far; complete when every choice has ended."""
        return self._meter.usage()

    @property
    def steps(self) -> StepStats | None:
        """Reasoning steps so far; None for an exact output."""
        return self._meter.steps

    @property
    def receipt(self) -> Receipt | None:
        """The signed receipt, if the client wants it; complete when every choice has ended."""
        if self._receipt is None:
            return None
        return self._receipt.signed(id=self.id, created=self.created_s, model=self.model_id)

    @property
    def fills_context(self) -> bool:
        """True if the context ends the answer before the client's own limit."""
        return self._requests[0].sampling.max_tokens != self._params.max_tokens

    def prompt_token_ids(self, index: int) -> tuple[int, ...]:
        """Return the prompt of a choice."""
        return tuple(self._requests[index].prompt_token_ids)

    def deltas(self) -> AsyncGenerator[Delta, None]:
        """Return the deltas of all choices, which run at once. Closing the stream aborts the unfinished ones."""
        is_admitted = asyncio.Event()
        choices = [self._choice(index, request, is_admitted) for index, request in enumerate(self._requests)]
        return choices[0] if len(choices) == 1 else fan_in(choices)

    async def choices(self) -> list[list[Delta]]:
        """Run all choices to their end and return the deltas of each."""
        gained: list[list[Delta]] = [[] for _ in self._requests]
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                gained[delta.index].append(delta)
        return gained

    async def _choice(
        self, index: int, request: GenerateRequest, is_admitted: asyncio.Event
    ) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of one choice. It ends, and with it the pair's work, at a finish reason or a stop string."""
        clock = TokenClock(self._metrics, len(request.prompt_token_ids), self._tenant, self._route)
        echo = echo_delta(index, request, self._params, self._tokenizer) if self._params.has_echo else None
        text = self._text(index, request, num_echoed_characters=len(echo.text) if echo else 0)
        reader = self._reader(request)
        batches = self._open_stream(request)
        if self.num_choices > 1:
            batches = leading(batches, is_admitted) if index == 0 else following(batches, is_admitted)
        is_first = True
        try:
            async with aclosing(batches):
                async for batch in batches:
                    if not (gained := _fed(text, batch)):
                        continue
                    self._count(index, gained, batch, clock)
                    if is_first:
                        gained, is_first = self._with_prompt(gained, batch[0], echo), False
                    for delta in [join_deltas(gained)] if text.thinks_once else runs_of(gained):
                        for part in [delta] if reader is None else reader.read(delta):
                            yield part
                    if text.is_finished:
                        return
        except GrammarError:
            clock.end(FinishReason.GRAMMAR.value)
            raise

    def _text(self, index: int, request: GenerateRequest, *, num_echoed_characters: int) -> ChoiceText:
        return ChoiceText(
            index,
            request,
            self._tokenizer,
            stop_strings=self.fields.stop or (),
            num_echoed_characters=num_echoed_characters,
            includes_stop=bool(self.fields.include_stop_str_in_output),
            thinking=self._params.thinking,
            new_detokenizer=self._new_detokenizer(),
        )

    def _count(self, index: int, gained: Sequence[Delta], batch: Sequence[TokenChunk], clock: TokenClock) -> None:
        """Count what choice `index` gained from a batch, in the usage, the receipt and the metrics."""
        self._meter.record(index, gained, batch)
        token_ids = [token_id for delta in gained for token_id in delta.token_ids]
        if self._receipt is not None:
            self._receipt.record(index, token_ids)
        clock.tick(len(token_ids))
        if (reason := gained[-1].finish_reason) is not None:
            clock.end(reason.value, batch[-1].speculation)

    def _with_prompt(self, gained: list[Delta], first_chunk: TokenChunk, echo: Delta | None) -> list[Delta]:
        """Add the echo and the prompt's logprobs, which come with the first tokens; the first token has none."""
        logprobs = (None, *first_chunk.prompt_logprobs)
        if echo is not None:
            gained = [replace(echo, logprobs=logprobs if echo.text_offsets else ()), *gained]
        if self.fields.prompt_logprobs is not None:
            gained[0] = replace(gained[0], prompt_logprobs=logprobs)
        return gained

    def _new_detokenizer(self) -> DetokenizerMaker:
        """Return a factory of detokenizers that show special tokens if the client wants them, and marks of calls."""
        is_skipping = self.fields.skip_special_tokens is not False and self._make_reader is None
        kept_ids = self._tool_format.token_ids.values() if self._tool_format and self._params.tool_schemas else ()
        return partial(make_detokenizer, skip_special_tokens=is_skipping, kept_ids=frozenset(kept_ids))

    def _reader(self, request: GenerateRequest) -> ToolCallParser | ResponseReader | None:
        schemas = self._params.tool_schemas
        if self._make_reader is not None:
            prompt = () if self._params.thinking else request.prompt_token_ids
            return self._make_reader(self._tokenizer.decode(prompt, skip_special_tokens=False), schemas)
        if self._tool_format is None or not schemas:
            return None
        return ToolCallParser(self._tool_format, schemas, has_calls_alone=self._params.has_calls_alone)
