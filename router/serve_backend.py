"""The pairs behind a Ray Serve handle: streams, the model card, metrics, and errors in our own words."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from typing import cast

from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from protos.errors import EngineError, OverloadedError, ServingError, UnavailableError
from protos.messages import GenerateRequest, ModelCard, TokenChunk

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 2.0
_END_OF_STREAM_TIMEOUT_S = 1.0


class ServeBackend:
    """`router.backend.Backend` over the handle of the pair deployment.

    The deployment has `generate(request)`, an async generator of `TokenChunk` or lists of them, `describe() ->
    ModelCard` and `metrics_text() -> str`.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._generate = handle.options(method_name="generate", stream=True)
        self._describe = handle.options(method_name="describe")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Sequence[TokenChunk], None]:
        """One sequence's chunks; the pair's generator is cancelled when this one is closed early."""
        stream = cast(DeploymentResponseGenerator, self._generate.remote(request))
        is_finished = False
        try:
            async for item in stream:
                batch = [item] if isinstance(item, TokenChunk) else item
                is_finished = any(chunk.finish_reason is not None for chunk in batch)
                yield batch
        except (Exception, asyncio.CancelledError) as error:
            raise _in_our_words(error) from error
        finally:
            await _end(stream, is_finished)

    async def describe(self) -> ModelCard:
        """The card of whichever pair Serve picks; all say the same."""
        try:
            return await self._describe.remote()
        except (Exception, asyncio.CancelledError) as error:
            raise _in_our_words(error) from error

    async def metrics_texts(self) -> Sequence[str]:
        """The metrics of all replicas that answer."""
        try:
            results = await self._handle.broadcast("metrics_text").results_async(return_exceptions=True)
        except (Exception, asyncio.CancelledError) as error:
            raise _in_our_words(error) from error
        for result in results:
            if isinstance(result, BaseException):
                logger.warning("a pair did not send its metrics: %s", result)
        return [result for result in results if isinstance(result, str)]


async def _end(stream: DeploymentResponseGenerator, is_finished: bool) -> None:
    """Read a finished stream's end, so that Serve counts it as done; cancel any other."""
    if is_finished:
        with suppress(Exception):
            async with asyncio.timeout(_END_OF_STREAM_TIMEOUT_S):
                async for _ in stream:
                    pass
                return
    stream.cancel()


def _in_our_words(error: BaseException) -> BaseException:
    """What the caller should see of an error that came through Serve."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, ServingError):
        return cause
    if isinstance(cause, BackPressureError):
        return OverloadedError(
            "All pairs are busy and their queues are full; try again later.",
            retry_after_s=cause.retry_after_s or _RETRY_AFTER_S,
        )
    if isinstance(cause, RayActorError | DeploymentUnavailableError):
        return UnavailableError("The pair that served this request is gone.", retry_after_s=_RETRY_AFTER_S)
    if isinstance(cause, RequestCancelledError | asyncio.CancelledError) and not _is_caller_cancelled():
        return UnavailableError("The pair that served this request gave it up.", retry_after_s=_RETRY_AFTER_S)
    if isinstance(cause, asyncio.CancelledError):
        return cause
    logger.error("a pair failed", exc_info=error)
    return EngineError(f"The engine failed: {cause}")


def _is_caller_cancelled() -> bool:
    """Whether the cancellation is ours, not the pair's: Serve reports both as `CancelledError`."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
