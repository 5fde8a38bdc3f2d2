"""One choice of a generation as a stream of deltas: text, tool calls, and the counts that go with them."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from protos.errors import GrammarError
from protos.messages import FinishReason, GenerateRequest, TokenChunk, TokenSource
from router.generation.choice_text import ChoiceText
from router.generation.delta import Delta, DeltaReader, join_deltas
from router.generation.usage import UsageMeter
from router.metrics.ingress_metrics import TokenClock
from router.requests.generate_params import GenerateParams
from router.tokenizer.detokenizer import make_detokenizer
from router.tokenizer.tokenizer import Tokenizer


@dataclass
class Choice:
    """The deltas of one choice. Iteration ends, and with it the pair's work, at a finish reason or a stop string."""

    index: int  # among the choices of the generation
    batches: AsyncGenerator[Sequence[TokenChunk], None]  # the pair's stream; closed with this one
    text: ChoiceText
    echo: Delta | None  # the prompt, until it has been sent
    reader: DeltaReader | None  # of calls; None where the model may call no tools
    meter: UsageMeter
    clock: TokenClock
    has_prompt_logprobs: bool = False
    _pending: deque[Delta] = field(default_factory=deque)  # read, and not yet passed on

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """Return the delta of the next batch, skipping batches that add nothing."""
        while not self._pending and not self.text.is_finished:
            try:
                batch = await anext(self.batches)
            except GrammarError:
                self.clock.end(FinishReason.GRAMMAR.value)
                raise
            self._pending.extend(self._read(batch))
        if not self._pending:
            raise StopAsyncIteration
        return self._pending.popleft()

    async def aclose(self) -> None:
        """End the pair's work on this choice."""
        await self.batches.aclose()

    def _read(self, batch: Sequence[TokenChunk]) -> list[Delta]:
        gained = [self.text.feed(chunk) for chunk in batch if not self.text.is_finished]
        if not gained:
            return []
        self.meter.record(self.index, gained, batch)
        self.clock.tick(sum(len(delta.token_ids) for delta in gained))
        if (reason := gained[-1].finish_reason) is not None:
            self.clock.end(reason.value, batch[-1].speculation)
        if self.echo is not None:
            gained.insert(0, _with_logprobs(self.echo, batch[0]))
            self.echo = None
        delta = join_deltas(gained)
        if self.has_prompt_logprobs:
            delta = replace(delta, prompt_logprobs=(None, *batch[0].prompt_logprobs))
            self.has_prompt_logprobs = False
        return [delta] if self.reader is None else self.reader.read(delta)


def echo_delta(index: int, request: GenerateRequest, params: GenerateParams, tokenizer: Tokenizer) -> Delta:
    """Return the prompt as the first delta of the answer."""
    detokenizer = make_detokenizer(tokenizer, (), skip_special_tokens=True)
    offsets, pieces = [], [""]
    num_characters = 0
    for token_id in request.prompt_token_ids:
        offsets.append(num_characters)
        pieces.append(detokenizer.push(token_id))
        num_characters += len(pieces[-1])
    decoded = "".join(pieces) + detokenizer.flush()
    prompt = params.prompts[index // params.num_choices_per_prompt]
    is_whole = len(prompt.token_ids) == len(request.prompt_token_ids)
    return Delta(
        index=index,
        text=(prompt.text if is_whole else None) or decoded,
        token_ids=request.prompt_token_ids,
        text_offsets=tuple(offsets) if params.num_logprobs is not None else (),
        sources=(TokenSource.PROMPT.value,) * len(offsets) if params.fields.return_token_sources else (),
    )


def _with_logprobs(echo: Delta, first_chunk: TokenChunk) -> Delta:
    """Add the prompt's logprobs, which the first chunk carries; the first token has none."""
    logprobs = (None, *first_chunk.prompt_logprobs) if echo.text_offsets else ()
    return replace(echo, logprobs=logprobs)
