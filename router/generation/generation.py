"""One client request in flight: its choices, what they gain, and what they cost."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from protos.messages import GenerateRequest, TokenChunk
from router.backend.backend import Backend
from router.generation.choice_text import ChoiceText
from router.generation.delta import Delta, join_deltas
from router.generation.fan_in import fan_in
from router.generation.tool_calls import ToolCallParser
from router.generation.usage import Usage, UsageMeter
from router.metrics.ingress_metrics import IngressMetrics
from router.requests.generate_params import GenerateParams
from router.requests.generation_fields import GenerationFields
from router.requests.tool_format import ToolFormat
from router.tokenizer.detokenizer import make_detokenizer
from router.tokenizer.tokenizer import Tokenizer


class Generation:
    """The choices of one client request: run once, read as deltas or as a whole."""

    def __init__(
        self,
        params: GenerateParams,
        requests: list[GenerateRequest],
        *,
        backend: Backend,
        tokenizer: Tokenizer,
        metrics: IngressMetrics,
        model_version: str,
        tool_format: ToolFormat | None = None,
    ) -> None:
        self.params = params
        self.model_version = model_version
        self.created_s = int(time.time())
        self._requests = requests
        self._backend = backend
        self._tokenizer = tokenizer
        self._metrics = metrics
        self._tool_format = tool_format
        self._meter = UsageMeter(requests, params.num_choices_per_prompt)

    @property
    def id(self) -> str:
        return self.params.request_id

    @property
    def fields(self) -> GenerationFields:
        return self.params.fields

    @property
    def num_choices(self) -> int:
        return len(self._requests)

    @property
    def usage(self) -> Usage:
        """Tokens counted so far; complete when every choice has ended."""
        return self._meter.usage()

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Runs all choices at once and yields what they gain. Closing it aborts those that still run."""
        streams = [self._choice(index, request) for index, request in enumerate(self._requests)]
        async with aclosing(fan_in(streams)) as merged:
            async for delta in merged:
                yield delta

    async def choices(self) -> list[Delta]:
        """Runs all choices to their end."""
        gained: list[list[Delta]] = [[] for _ in self._requests]
        async with aclosing(self.deltas()) as deltas:
            async for delta in deltas:
                gained[delta.index].append(delta)
        return [join_deltas(deltas_of_choice) for deltas_of_choice in gained]

    async def _choice(self, index: int, request: GenerateRequest) -> AsyncGenerator[Delta, None]:
        echo = self._echo(index, request) if self.params.does_echo else None
        text = ChoiceText(
            index,
            request,
            self._tokenizer,
            stop_strings=self.fields.stop or (),
            skip_special_tokens=self.fields.skip_special_tokens is not False,
            num_echoed_characters=len(echo.text) if echo else 0,
        )
        calls = self._tool_calls()
        clock = self._metrics.token_clock()
        async with aclosing(self._backend.generate(request)) as batches:
            async for batch in batches:
                gained = [text.feed(chunk) for chunk in batch if not text.is_finished]
                if not gained:
                    continue
                self._meter.record(index, gained, batch)
                clock.tick(sum(len(delta.token_ids) for delta in gained))
                if echo is not None:
                    gained.insert(0, _with_logprobs(echo, batch[0]))
                    echo = None
                delta = join_deltas(gained)
                yield delta if calls is None else calls.read(delta)
                if text.is_finished:
                    return

    def _tool_calls(self) -> ToolCallParser | None:
        """Where the model may call tools, what finds its calls in the text."""
        if self._tool_format is None or not self.params.tool_names:
            return None
        return ToolCallParser(self._tool_format, self.params.tool_names)

    def _echo(self, index: int, request: GenerateRequest) -> Delta:
        """The prompt, as the beginning of the answer."""
        detokenizer = make_detokenizer(self._tokenizer, (), skip_special_tokens=True)
        offsets, pieces = [], [""]
        num_characters = 0
        for token_id in request.prompt_token_ids:
            offsets.append(num_characters)
            pieces.append(detokenizer.push(token_id))
            num_characters += len(pieces[-1])
        decoded = "".join(pieces) + detokenizer.flush()
        prompt = self.params.prompts[index // self.params.num_choices_per_prompt]
        return Delta(
            index=index,
            text=prompt.text or decoded,
            token_ids=request.prompt_token_ids,
            text_offsets=tuple(offsets) if self.params.num_logprobs is not None else (),
        )


def _with_logprobs(echo: Delta, first_chunk: TokenChunk) -> Delta:
    """The echo with what the first chunk says of its tokens; the very first has no prediction."""
    logprobs = (None, *first_chunk.prompt_logprobs) if echo.text_offsets else ()
    return replace(echo, logprobs=logprobs)
