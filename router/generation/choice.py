"""One choice of a generation as a stream of deltas: text, tool calls, and the counts that go with them."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Self

from protos.messages import GenerateRequest, TokenChunk
from router.generation.choice_text import ChoiceText
from router.generation.delta import Delta, join_deltas
from router.generation.tool_calls import ToolCallParser
from router.generation.usage import UsageMeter
from router.metrics.ingress_metrics import TokenClock
from router.requests.generate_params import GenerateParams
from router.tokenizer.detokenizer import make_detokenizer
from router.tokenizer.tokenizer import Tokenizer


class Choice:
    """The deltas of one choice. Iteration ends, and with it the pair's work, at a finish reason or a stop string.

    Args:
        index: the choice among those of the generation.
        batches: the pair's stream for `request`; closed with this one.
        tool_calls: finds tool calls in the text; None where the model may call none.
    """

    def __init__(
        self,
        index: int,
        request: GenerateRequest,
        batches: AsyncGenerator[Sequence[TokenChunk], None],
        params: GenerateParams,
        *,
        tokenizer: Tokenizer,
        tool_calls: ToolCallParser | None,
        meter: UsageMeter,
        clock: TokenClock,
    ) -> None:
        self._index = index
        self._batches = batches
        self._echo = _echo_delta(index, request, params, tokenizer) if params.has_echo else None
        self._text = ChoiceText(
            index,
            request,
            tokenizer,
            stop_strings=params.fields.stop or (),
            skip_special_tokens=params.fields.skip_special_tokens is not False,
            num_echoed_characters=len(self._echo.text) if self._echo else 0,
        )
        self._tool_calls = tool_calls
        self._meter = meter
        self._clock = clock

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """Return what the next batch of the pair gave; a batch that gave nothing is passed over."""
        while not self._text.is_finished:
            if delta := self._read(await anext(self._batches)):
                return delta
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the pair's work on this choice."""
        await self._batches.aclose()

    def _read(self, batch: Sequence[TokenChunk]) -> Delta | None:
        gained = [self._text.feed(chunk) for chunk in batch if not self._text.is_finished]
        if not gained:
            return None
        self._meter.record(self._index, gained, batch)
        self._clock.tick(sum(len(delta.token_ids) for delta in gained))
        if self._echo is not None:
            gained.insert(0, _with_logprobs(self._echo, batch[0]))
            self._echo = None
        delta = join_deltas(gained)
        return delta if self._tool_calls is None else self._tool_calls.read(delta)


def _echo_delta(index: int, request: GenerateRequest, params: GenerateParams, tokenizer: Tokenizer) -> Delta:
    """Return the prompt, as the beginning of the answer."""
    detokenizer = make_detokenizer(tokenizer, (), skip_special_tokens=True)
    offsets, pieces = [], [""]
    num_characters = 0
    for token_id in request.prompt_token_ids:
        offsets.append(num_characters)
        pieces.append(detokenizer.push(token_id))
        num_characters += len(pieces[-1])
    decoded = "".join(pieces) + detokenizer.flush()
    prompt = params.prompts[index // params.num_choices_per_prompt]
    return Delta(
        index=index,
        text=prompt.text or decoded,
        token_ids=request.prompt_token_ids,
        text_offsets=tuple(offsets) if params.num_logprobs is not None else (),
    )


def _with_logprobs(echo: Delta, first_chunk: TokenChunk) -> Delta:
    """Return the echo with the logprobs that the first chunk has of its tokens; the very first has no prediction."""
    logprobs = (None, *first_chunk.prompt_logprobs) if echo.text_offsets else ()
    return replace(echo, logprobs=logprobs)
