"""A stream that outlives its pair: if the pair is lost, another goes on from the committed tokens.

The committed ids and the seed are a sequence's whole state. With coupled verification the continuation is, token for
token, what the lost pair would have said; with other modes it follows the same distribution.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from protos.errors import DeadlineExceededError, OverloadedError, ServingError, UnavailableError
from protos.messages import FinishReason, GenerateRequest, ModelCard, TokenChunk
from router.backend.backend import Backend
from router.config import IngressLimits

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


class MigratingBackend:
    """A `Backend` whose streams survive `UnavailableError`, silence included, of the backend inside.

    A request that was never accepted is refused at once (`OverloadedError` passes through); one that has been
    accepted is moved until it finishes, `limits.max_migrations` or `limits.migration_deadline_s` is reached, or its
    own deadline has passed. `on_move` hears of every attempt after the first.
    """

    def __init__(self, inner: Backend, limits: IngressLimits, on_move: Callable[[], None] = lambda: None) -> None:
        self._inner = inner
        self._limits = limits
        self._on_move = on_move

    async def describe(self) -> ModelCard:
        return await self._inner.describe()

    async def metrics_texts(self) -> Sequence[str]:
        return await self._inner.metrics_texts()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Sequence[TokenChunk], None]:
        """As the inner backend's; chunks already yielded are never yielded again."""
        journey = _Journey(request, self._limits)
        while not journey.is_finished:
            try:
                async with aclosing(self._attempt(journey)) as chunks:
                    async for batch in chunks:
                        yield batch
            except (UnavailableError, OverloadedError) as error:
                pause_s = journey.pause_before_next_attempt_s(error)
                num_committed = len(journey.committed)
                logger.warning(
                    "%s: %s Asking again in %.2f s, %d tokens on.", request.request_id, error, pause_s, num_committed
                )
                self._on_move()
                await asyncio.sleep(pause_s)

    async def _attempt(self, journey: _Journey) -> AsyncGenerator[Sequence[TokenChunk], None]:
        """One pair's part of the stream."""
        async with aclosing(self._inner.generate(journey.next_request())) as chunks:
            timeout_s = self._limits.first_token_timeout_s
            while not journey.is_finished:
                batch = await _next_batch(chunks, timeout_s)
                _refuse_early_end(batch)
                timeout_s = self._limits.inter_token_timeout_s
                journey.record(batch)
                yield batch


class _Journey:
    """One sequence on its way: what is committed, and how much patience is left."""

    def __init__(self, request: GenerateRequest, limits: IngressLimits) -> None:
        self._request = request
        self._limits = limits
        self._started_s = time.monotonic()
        self._broken_since_s: float | None = None
        self._num_attempts = 0
        self._was_accepted = False
        self.committed = list(request.output_token_ids)
        self.is_finished = False

    def record(self, batch: Sequence[TokenChunk]) -> None:
        """Remember what has been committed; any progress restores the patience."""
        for chunk in batch:
            self.committed.extend(chunk.token_ids)
            self.is_finished |= chunk.finish_reason is not None
        self._was_accepted = True
        self._broken_since_s = None
        self._num_attempts = 0

    def next_request(self) -> GenerateRequest:
        """The request for the next pair: the same, from the committed tokens on, within what is left of its time."""
        timeout_s = self._request.timeout_s
        if timeout_s is not None:
            timeout_s -= time.monotonic() - self._started_s
            if timeout_s <= 0:
                raise DeadlineExceededError(
                    f"timeout_s, {self._request.timeout_s}, passed before the answer was complete."
                )
        sampling = self._request.sampling
        if self.committed:  # the first chunk has come, and with it what was wanted of the prompt
            sampling = replace(sampling, num_prompt_logprobs=None)
        return replace(self._request, output_token_ids=tuple(self.committed), timeout_s=timeout_s, sampling=sampling)

    def pause_before_next_attempt_s(self, error: ServingError) -> float:
        """Seconds until the next attempt. Raises `error` if there is to be none."""
        if isinstance(error, OverloadedError) and not self._was_accepted and self._num_attempts == 0:
            raise error
        now_s = time.monotonic()
        if self._broken_since_s is None:
            self._broken_since_s = now_s
        self._num_attempts += 1
        is_late = now_s - self._broken_since_s > self._limits.migration_deadline_s
        if is_late or self._num_attempts > self._limits.max_migrations:
            raise error
        return min(_FIRST_PAUSE_S * 2 ** (self._num_attempts - 1), _LONGEST_PAUSE_S)


def _refuse_early_end(batch: Sequence[TokenChunk]) -> None:
    """Nothing of a batch that says so is committed: the pair gave the sequence up, or its time is over."""
    reasons = {chunk.finish_reason for chunk in batch}
    if FinishReason.ABORT in reasons:
        raise UnavailableError("The pair gave the sequence up.")
    if FinishReason.TIMEOUT in reasons:
        raise DeadlineExceededError("The request's time-out passed before the answer was complete.")


async def _next_batch(chunks: AsyncGenerator[Sequence[TokenChunk], None], timeout_s: float) -> Sequence[TokenChunk]:
    try:
        async with asyncio.timeout(timeout_s):
            return await anext(chunks)
    except StopAsyncIteration:
        raise UnavailableError("The pair ended its stream before the answer was complete.") from None
    except TimeoutError:
        raise UnavailableError(f"The pair has been silent for {timeout_s} s.") from None
