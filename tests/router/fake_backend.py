"""A backend of twenty lines: the next token is a fixed function of the last, so every continuation is known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field

from protos.errors import ServingError
from protos.messages import (
    FinishReason,
    GenerateRequest,
    ModelCard,
    SpeculationMethod,
    SpeculationStats,
    TokenChunk,
    TokenLogprobs,
)
from protos.served_draft import DraftOrder, DraftReport

CARD = ModelCard(
    vocab_size=300,
    max_model_len=128,
    eos_token_ids=(0,),
    model_version="v1",
    block_size=16,
    max_draft_tokens=4,
    speculation_methods=(SpeculationMethod.MODEL, SpeculationMethod.NGRAM, SpeculationMethod.NONE),
)

NextToken = Callable[[GenerateRequest, Sequence[int]], int]


def count_up(request: GenerateRequest, token_ids: Sequence[int]) -> int:
    """The token after t is t + 1, within the printable byte tokens; sample k starts k later."""
    step = 1 + (request.sample_index if len(token_ids) == len(request.prompt_token_ids) else 0)
    return 1 + (token_ids[-1] + step - 1) % 250


def say(*token_ids: int) -> NextToken:
    """Return a model that generates this after any prompt."""

    def next_token(request: GenerateRequest, so_far: Sequence[int]) -> int:
        return token_ids[(len(so_far) - len(request.prompt_token_ids)) % len(token_ids)]

    return next_token


@dataclass
class FakeBackend:
    """Commits `tokens_per_step` at a time; `failures` are raised, in order, after `fail_after` tokens of a stream."""

    next_token: NextToken = count_up
    tokens_per_step: int = 2
    step_s: float = 0.0
    failures: list[BaseException] = field(default_factory=list)
    fail_after: int = 0
    card: ModelCard = CARD
    texts: Sequence[str] = ()
    requests: list[GenerateRequest] = field(default_factory=list)
    num_drafts_to_kill: int = 0
    drafts: Sequence[DraftReport] = ()
    draft_orders: list[DraftOrder] = field(default_factory=list)
    draft_failure: ServingError | None = None
    num_running: int = 0
    num_closed: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Sequence[TokenChunk], None]:
        self.requests.append(request)
        self.num_running += 1
        self._idle.clear()
        try:
            async for chunk in self._run(request):
                yield [chunk]
        finally:
            self.num_running -= 1
            self.num_closed += 1
            if self.num_running == 0:
                self._idle.set()

    async def until_idle(self) -> None:
        """Returns once nothing runs; a time-out means that something was never closed."""
        async with asyncio.timeout(5):
            await self._idle.wait()

    async def _run(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        tokens = [*request.prompt_token_ids, *request.output_token_ids]
        num_prompt, num_new, num_passes = len(request.prompt_token_ids), 0, 0
        while True:
            if self.failures and num_new >= self.fail_after:
                raise self.failures.pop(0)
            await asyncio.sleep(self.step_s)
            new: list[int] = []
            stop = None
            while (
                len(new) < self.tokens_per_step
                and stop is None
                and len(tokens) - num_prompt < request.sampling.max_tokens
            ):
                new.append(self.next_token(request, tokens))
                tokens.append(new[-1])
                stop = new[-1] if new[-1] in request.sampling.stop_token_ids else None
            num_new += len(new)
            num_passes += bool(new)  # a prompt alone is no verification
            is_full = len(tokens) - num_prompt >= request.sampling.max_tokens
            reason = FinishReason.STOP if stop is not None else FinishReason.LENGTH if is_full else None
            stats = SpeculationStats(num_new, num_new - num_passes, (0, num_passes))
            yield TokenChunk(
                request.request_id,
                tuple(new),
                tuple(_logprobs(request, token) for token in new) if request.sampling.num_logprobs is not None else (),
                reason,
                stop,
                num_cached_tokens=1,
                speculation=stats if reason else None,
                prompt_logprobs=_prompt_logprobs(request) if num_new == len(new) else (),
                offset=len(tokens) - num_prompt - len(new),
            )
            if reason:
                return

    async def describe(self) -> ModelCard:
        return self.card

    async def kill_drafts(self) -> int:
        return self.num_drafts_to_kill

    async def order_drafts(self, order: DraftOrder) -> Sequence[DraftReport]:
        self.draft_orders.append(order)
        if self.draft_failure is not None:
            raise self.draft_failure
        return self.drafts

    async def metrics_texts(self) -> Sequence[str]:
        return self.texts


def _logprobs(request: GenerateRequest, token_id: int) -> TokenLogprobs:
    top = tuple((token_id + rank, -0.5 - rank) for rank in range(request.sampling.num_logprobs or 0))
    return TokenLogprobs(token_id, -0.5, top)


def _prompt_logprobs(request: GenerateRequest) -> tuple[TokenLogprobs, ...]:
    num_top = request.sampling.num_prompt_logprobs
    if num_top is None:
        return ()
    return tuple(TokenLogprobs(token, -0.25, ((token, -0.25),) * num_top) for token in request.prompt_token_ids[1:])
