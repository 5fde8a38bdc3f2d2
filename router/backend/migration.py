"""Streams that survive the loss of their pair: another pair continues from the committed tokens.

The committed ids and the seed are a sequence's whole state. With coupled verification the continuation equals, token
for token, the output of the lost pair; other modes follow the same distribution. Each attempt has its own id, and each
chunk has the offset of its tokens in the output, so a token is delivered once even if it arrives late or twice.

While all pairs are full, a gate refuses new requests without asking them.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from protos.backoff import Backoff
from protos.errors import (
    DeadlineExceededError,
    EngineLostError,
    GivenUpError,
    GrammarError,
    ModelChangedError,
    NonFiniteLogitsError,
    OverloadedError,
    ServingError,
    UnavailableError,
)
from protos.messages import FinishReason, GenerateRequest, SpeculationStats, TokenChunk
from router.backend import OpenStream

logger = logging.getLogger(__name__)

DEADLINE_S = 60.0  # a broken stream must continue within this
FIRST_TOKEN_S = 600.0  # includes the wait in the pair's queue
SILENCE_S = 30.0  # a pair that is silent for longer is given up, and the stream moves
_MAX_MIGRATIONS = 64  # within the deadline
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_APART_S = 3.0  # the longest random extra pause: requests that crashed two engines together meet no third one
_NUM_FREE = 3  # consecutive refusals until the gate closes: another pair may have room
_FIRST_REFUSAL_S = 0.05  # also the time that a trial request gets to be answered before the next one is let in
_STREAK_S = 1.0  # the longest gap between refusals of one streak
_LONGEST_REFUSAL_S = 0.2  # freed places may stay idle for this long, but the pair does not: others wait in its queue


class MigratingStreams:
    """Streams of a backend that survive its `UnavailableError`s, silence included.

    A request that was never accepted is refused at once (`OverloadedError` passes through). An accepted one is moved
    until it finishes, it got no token for `DEADLINE_S`, three engines in a row ended while computing it, or its own
    deadline passes. `gate` is notified of refusals and acceptances. `on_move` is called for every attempt after the
    first, `on_model_change` when a pair refuses a request that was prepared for another model.
    """

    def __init__(
        self,
        open_stream: OpenStream,
        on_move: Callable[[], None] = lambda: None,
        on_model_change: Callable[[], None] = lambda: None,
    ) -> None:
        self.gate = RefusalGate()
        self._open_stream = open_stream
        self._on_move = on_move
        self._on_model_change = on_model_change

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Sequence[TokenChunk], None]:
        """Yield the chunks of the pairs' streams; a chunk is never yielded twice.

        If other choices wait for this request (`num_places`), the first batch may be empty: it reports that a pair has
        taken the request. Other signs of life are not yielded.
        """
        state = MigrationState(request)
        while not state.is_finished:
            try:
                async with aclosing(self._open_stream(state.next_request())) as batches:
                    while not state.is_finished:
                        is_new = not state.was_accepted
                        batch = await state.next_batch(batches)
                        if is_new:
                            self.gate.accepted(request)
                        if state.take_news() or batch:
                            yield batch
            except (UnavailableError, OverloadedError) as error:
                await self._pause(state, error)
            except ModelChangedError:
                self._on_model_change()
                raise

    async def _pause(self, state: MigrationState, error: ServingError) -> None:
        """Wait until the next attempt is due. Raises `error` or a follow-up error if no attempt is left."""
        if isinstance(error, OverloadedError) and not state.was_accepted:
            self.gate.refused(state.request, error)
        pause_s = state.pause_before_next_attempt_s(error)
        num_committed = len(state.committed)
        text = "request %s: %s Retrying in %.2f s after %d tokens."
        logger.warning(text, state.request.request_id, error, pause_s, num_committed)
        self._on_move()
        await asyncio.sleep(pause_s)


class MigrationState:
    """One sequence across its pairs: the committed tokens, and the remaining attempts and time."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self._started_s = time.monotonic()
        self._broken_since_s: float | None = None
        self._num_attempts = 0
        self._num_lost_engines = 0
        self._num_moves = -1
        self._attempt_id = request.request_id
        self._backoff = Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S)
        self.was_accepted = request.is_admitted  # a pair has taken the request
        self._has_waiting = request.num_places > 1  # other choices, which begin once a pair has taken this one
        self._silence_s = 0.0  # the longest wait for the next batch or sign of life
        self._first_token_until_s = math.inf
        self._past_speculation: SpeculationStats | None = None  # of the earlier attempts
        self._speculation: SpeculationStats | None = None
        self.committed = list(request.output_token_ids)
        self.is_finished = False
        self._is_at_dead_end = False  # its grammar allows nothing after the committed tokens

    def take_news(self) -> bool:
        """Return True once, if others wait to learn that a pair has taken this request."""
        is_news, self._has_waiting = self._has_waiting, False
        return is_news

    def next_request(self) -> GenerateRequest:
        """Return the request for the next pair: continued from the committed tokens, with the remaining time."""
        self._silence_s = FIRST_TOKEN_S
        self._first_token_until_s = time.monotonic() + self._silence_s
        self._num_moves += 1
        self._past_speculation = self._speculation
        if self._num_moves:
            self._attempt_id = f"{self.request.request_id}.{self._num_moves}"
        # The time that is left of the client's limit.
        timeout_s = self.request.timeout_s
        if timeout_s is not None:
            timeout_s -= time.monotonic() - self._started_s
            if timeout_s <= 0:
                raise DeadlineExceededError(
                    f"timeout_s, {self.request.timeout_s}, passed before the answer was complete."
                )
        # Continue from the committed tokens; the prompt's logprobs have been sent.
        sampling = self.request.sampling
        if self.committed:  # the first chunk has arrived, with the logprobs of the prompt
            sampling = replace(sampling, num_prompt_logprobs=None)
        return replace(
            self.request,
            request_id=self._attempt_id,
            output_token_ids=tuple(self.committed),
            timeout_s=timeout_s,
            sampling=sampling,
            num_places=self.request.num_places if self._has_waiting else 1,
            is_admitted=self.was_accepted,
            is_moved=self.was_accepted and self._num_moves > 0,
        )

    async def next_batch(self, batches: AsyncGenerator[Sequence[TokenChunk], None]) -> Sequence[TokenChunk]:
        """Receive and record the pair's next batch, and return its new chunks; empty for a sign of life.

        Raises:
            UnavailableError: the pair was silent for too long, ended its stream, lost tokens, or gave the sequence up.
            DeadlineExceededError: the request's deadline has passed.
            GrammarError: the grammar allows nothing after the previous batch.
        """
        if self._is_at_dead_end:
            raise _grammar_error(self.request)
        try:
            async with asyncio.timeout(self._silence_s):
                batch = await anext(batches)
        except StopAsyncIteration:
            raise UnavailableError("The pair ended its stream before the answer was complete.") from None
        except TimeoutError:
            raise UnavailableError(f"The pair has been silent for {self._silence_s} s.") from None
        batch = [chunk for chunk in batch if chunk.request_id == self._attempt_id]
        if not batch:
            self.was_accepted = True
            self._silence_s = min(SILENCE_S, self._first_token_until_s - time.monotonic())
            return ()
        _refuse_early_end(batch)
        if any(chunk.finish_reason is FinishReason.GRAMMAR for chunk in batch):
            self._is_at_dead_end = True
            batch = [replace(chunk, finish_reason=None) for chunk in batch]
        return self._record(batch)

    def _record(self, batch: Sequence[TokenChunk]) -> Sequence[TokenChunk]:
        """Record and return the new tokens; any progress resets the attempts and the time for migrations."""
        added = []
        for chunk in batch:
            if (new := _unread(chunk, len(self.committed))) is not None and not self.is_finished:
                added.append(self._with_past(new))
                self.committed.extend(new.token_ids)
                self.is_finished = new.finish_reason is not None
        self._first_token_until_s = math.inf
        self._silence_s = SILENCE_S
        self.was_accepted = True
        self._broken_since_s = None
        self._num_attempts = self._num_lost_engines = 0
        self._backoff.reset()
        return added

    def _with_past(self, chunk: TokenChunk) -> TokenChunk:
        """Add the counts of earlier attempts to the chunk's speculation statistics."""
        if chunk.speculation is not None:
            past = self._past_speculation
            self._speculation = chunk.speculation if past is None else chunk.speculation + past
        return chunk if chunk.speculation is self._speculation else replace(chunk, speculation=self._speculation)

    def pause_before_next_attempt_s(self, error: ServingError) -> float:
        """Return the seconds until the next attempt.

        Raises:
            GivenUpError: the request has crashed as many engines as allowed.
            ServingError: `error`, if no attempt is left.
        """
        self._num_lost_engines += isinstance(error, EngineLostError)
        if self._num_lost_engines >= 3:  # a request that crashes engines must not reach all of them
            raise GivenUpError(
                f"{self._num_lost_engines} engines in a row ended while they computed this request, with no token "
                "between. It is not tried again; if another request was the cause, send it once more."
            ) from error
        if isinstance(error, OverloadedError) and not self.was_accepted and self._num_attempts == 0:
            raise error
        now_s = time.monotonic()
        if self._broken_since_s is None:
            self._broken_since_s = now_s
        self._num_attempts += 1
        if now_s - self._broken_since_s > DEADLINE_S or self._num_attempts > _MAX_MIGRATIONS:
            raise error
        apart_s = _APART_S * random.random() if self._num_lost_engines > 1 else 0.0
        return self._backoff.next() + apart_s


def _unread(chunk: TokenChunk, num_committed: int) -> TokenChunk | None:
    """Return the part of a chunk that is not committed yet; None if all of it is.

    Raises:
        UnavailableError: tokens before the chunk are missing.
    """
    if chunk.draft_ids:
        return chunk  # drafts under verification: no part of the output
    num_read = num_committed - chunk.offset
    if num_read < 0:
        raise UnavailableError(f"{-num_read} tokens were lost on the way from the pair.")
    if num_read == 0:
        return chunk
    if num_read >= len(chunk.token_ids) and (chunk.finish_reason is None or num_read > len(chunk.token_ids)):
        return None
    return replace(
        chunk,
        token_ids=chunk.token_ids[num_read:],
        logprobs=chunk.logprobs[num_read:],
        sources=chunk.sources[num_read:],
        prompt_logprobs=(),
        offset=num_committed,
    )


def _refuse_early_end(batch: Sequence[TokenChunk]) -> None:
    """Raise if the pair gave the sequence up, its deadline passed, or its logits are not finite; commits nothing."""
    reasons = {chunk.finish_reason for chunk in batch}
    if FinishReason.ABORT in reasons:
        raise UnavailableError("The pair gave the sequence up.")
    if FinishReason.TIMEOUT in reasons:
        raise DeadlineExceededError("The request's time-out passed before the answer was complete.")
    if FinishReason.NON_FINITE in reasons:
        raise NonFiniteLogitsError(batch[-1].error)


def _grammar_error(request: GenerateRequest) -> GrammarError:
    grammar = request.sampling.grammar
    param = None if grammar is None else grammar.param
    return GrammarError(
        f"The answer cannot continue: {param or 'its grammar'} allows no token and no end, or the "
        "parser's limits were reached. Change it so that every prefix of an answer can be completed, or make it "
        "simpler.",
        param=param,
    )


@dataclass(slots=True)
class _Streak:
    """Consecutive refusals of one tenant, and the places of the smallest refused request."""

    num_refusals: int
    num_places: int
    last_s: float
    until_s: float
    spacing_s: float
    error: OverloadedError


class RefusalGate:
    """Closes for a tenant after a few consecutive refusals, for a moment each time; then one request may try.

    Each accepted request halves the pause, so freed places are taken soon and few requests are refused when there is
    room. A refusal by a pair costs as much as the start of a request, in both processes: at a hundred times the
    capacity, refusals would use up the engines' time.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._streaks: dict[str, _Streak] = {}

    def check(self, tenant: str, num_places: int) -> None:
        """Raise the last OverloadedError again if a request with this many choices is certain to be refused."""
        streak = self._streaks.get(tenant)
        if streak is None or streak.num_refusals <= _NUM_FREE or num_places < streak.num_places:
            return
        now_s = self._clock()
        if now_s - streak.last_s >= _STREAK_S:
            del self._streaks[tenant]
        elif now_s >= streak.until_s:
            streak.until_s = now_s + streak.spacing_s
        else:
            raise OverloadedError(str(streak.error), retry_after_s=streak.error.retry_after_s)

    def refused(self, request: GenerateRequest, error: OverloadedError) -> None:
        """Record a pair's refusal."""
        now_s = self._clock()
        streak = self._streaks.get(request.tenant)
        num_refusals, num_places = 1, request.num_places
        if streak is not None and now_s - streak.last_s < _STREAK_S:
            num_refusals, num_places = streak.num_refusals + 1, min(streak.num_places, num_places)
        until_s = now_s + self._pause_s(num_refusals)
        self._streaks[request.tenant] = _Streak(num_refusals, num_places, now_s, until_s, _FIRST_REFUSAL_S, error)

    @staticmethod
    def _pause_s(num_refusals: int) -> float:
        if num_refusals <= _NUM_FREE:
            return 0.0
        return min(_LONGEST_REFUSAL_S, _FIRST_REFUSAL_S * 2.0 ** min(num_refusals - _NUM_FREE - 1, 8))

    def accepted(self, request: GenerateRequest) -> None:
        """Record that a pair accepted a request."""
        streak = self._streaks.get(request.tenant)
        if streak is None:
            return
        streak.spacing_s /= 2
        streak.until_s = self._clock()
        if streak.num_refusals <= _NUM_FREE or streak.spacing_s < 0.001:
            del self._streaks[request.tenant]
