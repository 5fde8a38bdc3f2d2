"""Ray Serve as an ingress sees it: the pairs by their handle, and the state and metrics of the application.

Serve lets a call wait for a replica even if none will ever start. It also lets a replica that is being replaced serve
its open connections until they close. Each replica's metrics have a time-out: a hanging replica hides only itself.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import Context
from dataclasses import replace
from typing import Any, Generic, TypeVar, cast

from ray import serve
from ray.exceptions import RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ReplicaState  # type: ignore[attr-defined]  # imported there

from protos.errors import EngineError, OverloadedError, ServingError, ShuttingDownError, UnavailableError
from protos.messages import GenerateRequest, TokenChunk
from protos.served_model import DraftOrder, DraftReport, ModelCard
from router.backend.token_feed import Inbox, TokenListener
from router.routing.request_routing import RequestRouting
from router.routing.routed_call import RoutedCall

logger = logging.getLogger(__name__)

Text = TypeVar("Text")

INGRESS = "Ingress"
_PERIOD_S = 2.0
_ANSWER_TIMEOUT_S = 5.0
TIMEOUT_S = 2.0  # for a replica's metrics
UP = "outrider_replica_up"
_HEAD = f"# HELP {UP} 1: the replica has sent its metrics within {TIMEOUT_S:g} s; 0: it has not.\n# TYPE {UP} gauge\n"
_NAME = re.compile(r'\breplica="([^"]*)"')
_TAKEN_TIMEOUT_S = 2.0  # for a pair to take the request, before the application's state is checked


class ServeBackend:
    """`router.backend.Backend` over the handle of the pair deployment.

    The deployment has `generate(request)`, an async generator of `TokenChunk` or lists of them, `describe() ->
    ModelCard` and `metrics_text() -> str`. `prefill` is used for its `metrics_text` only. A request that no pair has
    taken fails once `is_deleted` is true.
    """

    def __init__(
        self,
        handle: DeploymentHandle[Any],
        routing: RequestRouting,
        is_deleted: Callable[[], Awaitable[bool]],
        prefill: DeploymentHandle[Any] | None = None,
    ) -> None:
        self._handle = handle
        self._prefill = prefill
        self._routing = routing
        self._is_deleted = is_deleted
        self._pair_texts, self._prefill_texts = ReplicaTexts(_name_in), ReplicaTexts(_name_in)
        self._feed = TokenListener()
        self._generate = handle.options(method_name="generate", stream=True)
        self._describe = handle.options(method_name="describe")

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Sequence[TokenChunk], None]:
        """Yield one sequence's chunks; closing this generator early cancels the pair's."""
        request = replace(request, feed_address=await self._feed.address())
        call = self._routing.open(request)
        inbox = self._feed.open(request.request_id)
        # In a new context: calls of one client request would share Serve's request id, and Serve's router serves only
        # the first call of an id.
        stream = cast("DeploymentResponseGenerator[Any]", Context().run(self._generate.remote, call))
        reading = asyncio.create_task(_read(stream, inbox))
        is_accepted = is_finished = False
        try:
            batch = await self._first(call, inbox)
            while not is_finished:
                if batch and not is_accepted:
                    is_accepted = True
                    self._routing.accepted(call, batch[0])
                is_finished = any(chunk.finish_reason is not None for chunk in batch)
                yield self._routing.explained(call, batch)
                if not is_finished:
                    batch = await inbox.next()
        except (Exception, asyncio.CancelledError) as error:
            raise _as_serving_error(error) from error
        finally:
            self._feed.close(request.request_id)
            if not is_accepted:
                self._routing.refused(call)
            await _end(stream, reading, is_finished)

    async def _first(self, call: RoutedCall, inbox: Inbox) -> list[TokenChunk]:
        """Return the first batch. Serve would wait for a replica even if none can ever come."""
        first = asyncio.ensure_future(inbox.next())
        try:
            while not (await asyncio.wait({first}, timeout=_TAKEN_TIMEOUT_S))[0]:
                if not call.is_taken and await self._is_deleted():
                    raise ShuttingDownError("The server is being taken down, and no pair is left to answer.")
            return first.result()
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)  # its outcome no longer matters

    async def describe(self) -> ModelCard:
        """Return the card from the pair that Serve picks; all pairs have the same card."""
        with _as_serving_errors():
            card: ModelCard = await self._describe.remote()
        self._routing.learn(card)
        return card

    async def kill_drafts(self) -> int:
        """Kill the draft of every pair, and return how many had one."""
        with _as_serving_errors():
            results = await self._handle.broadcast("kill_draft").results_async(return_exceptions=True)
        return sum(result is True for result in results)

    async def order_drafts(self, order: DraftOrder) -> Sequence[DraftReport]:
        """Apply an order to every pair. If pairs fail, raise the first error with their number."""
        with _as_serving_errors():
            results = await self._handle.broadcast("order_draft", order).results_async(return_exceptions=True)
        failures = [_as_serving_error(result) for result in results if isinstance(result, BaseException)]
        if not failures:
            return [report for reports in results for report in reports]
        first = failures[0]
        if isinstance(first, ServingError) and len(results) > 1:
            raise type(first)(f"{len(failures)} of {len(results)} pairs: {first.message}", param=first.param)
        raise first

    async def metrics_texts(self) -> Sequence[str]:
        """Return the metrics of all replicas, pairs first; failing prefill replicas do not lose the pairs' metrics."""
        with _as_serving_errors():
            pairs, prefill = await asyncio.gather(_metrics_of(self._pair_texts, self._handle), self._prefill_metrics())
        return [*pairs, *prefill]

    async def _prefill_metrics(self) -> list[str]:
        if self._prefill is None:
            return []
        try:
            async with asyncio.timeout(4.0):  # for Serve to know a replica, and for each to answer
                return await _metrics_of(self._prefill_texts, self._prefill)
        except Exception as error:
            logger.warning("prefill replicas did not send their metrics: %s", error)
            return []


async def _read(stream: DeploymentResponseGenerator[Any], inbox: Inbox) -> None:
    """Move everything from Serve's stream into the inbox, including its end or error."""
    try:
        async for item in stream:
            inbox.put([item] if isinstance(item, TokenChunk) else item)
    except (Exception, asyncio.CancelledError) as error:  # the reader of the inbox raises it
        inbox.fail(error)
    else:
        inbox.end()


async def _metrics_of(texts: ReplicaTexts[str], handle: DeploymentHandle[Any]) -> list[str]:
    answers = await texts.read(handle)
    return [(text or "") + up_text("replica", name, text is not None) for name, text in answers.items()]


def _name_in(text: str) -> str:
    found = _NAME.search(text)
    return found[1] if found else ""


async def _end(stream: DeploymentResponseGenerator[Any], reading: asyncio.Task[None], is_finished: bool) -> None:
    """Drain a finished stream, so that Serve counts it as done; cancel any other."""
    if is_finished:
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                return await reading
    reading.cancel()
    stream.cancel()


@contextmanager
def _as_serving_errors() -> Iterator[None]:
    """Raise the errors of calls through Serve as `ServingError`s."""
    try:
        yield
    except (Exception, asyncio.CancelledError) as error:
        raise _as_serving_error(error) from error


def _as_serving_error(error: BaseException) -> BaseException:
    """Translate an error that came through Serve for the caller."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, ServingError):
        return cause
    if isinstance(cause, BackPressureError):
        return OverloadedError(
            "All pairs are busy and their queues are full; try again later.",
            retry_after_s=cause.retry_after_s or 2.0,
        )
    if (loss := _loss(cause)) is not None:
        return UnavailableError(loss, retry_after_s=2.0)
    if isinstance(cause, asyncio.CancelledError):
        return cause
    logger.error("a pair failed", exc_info=error)
    return EngineError(f"The engine failed: {cause}")


def _loss(cause: BaseException) -> str | None:
    """Describe how the pair was lost; None for an error of another kind."""
    match cause:
        case StopAsyncIteration():
            return "The pair ended its stream before the answer was complete."
        case RayActorError() | DeploymentUnavailableError():
            return "The pair that served this request is gone."
        case RequestCancelledError() | asyncio.CancelledError() if not _is_caller_cancelled():
            return "The pair that served this request gave it up."
        case _:
            return None


def _is_caller_cancelled() -> bool:
    """True if the cancellation is the caller's, not the pair's: Serve reports both as `CancelledError`."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class ApplicationWatch:
    """Queries Serve's controller about this replica's application, at most once per period."""

    def __init__(self) -> None:
        self._status: ApplicationStatusOverview | None = None
        self._question: asyncio.Task[None] | None = None
        self._asked_s = 0.0
        # a thread of its own: while the controller hangs, calls would use up the shared threads
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="application-watch")
        self._frontends: DeploymentHandle[Any] | None = None
        self._frontend_texts: ReplicaTexts[tuple[str, str]] = ReplicaTexts(lambda answer: answer[0])

    async def is_deleted(self) -> bool:
        """True if the application is being deleted, as last reported by the controller."""
        await self._ask()
        return self._status is not None and self._status.status == ApplicationStatus.DELETING

    def stay(self) -> Callable[[], Awaitable[bool]]:
        """Return a predicate for an endless stream: true once this replica may be about to end.

        The controller reports how many ingress replicas are stopping, but not which ones. The predicate is true once
        more are stopping than when the stream began.
        """
        min_leaving: int | None = None

        async def is_over() -> bool:
            nonlocal min_leaving
            if await self.is_deleted():
                return True
            num_leaving = self._num_leaving()
            min_leaving = num_leaving if min_leaving is None else min(min_leaving, num_leaving)
            return num_leaving > min_leaving

        return is_over

    async def frontend_texts(self) -> Mapping[str, str]:
        """Return the metrics text of every ingress replica by its name, this one included.

        A silent replica has only the series that reports it as down.

        Raises:
            RuntimeError: no replica answered.
        """
        if self._frontends is None:
            name = serve.get_replica_context().app_name
            self._frontends = await asyncio.to_thread(serve.get_deployment_handle, INGRESS, name)
        answers = await self._frontend_texts.read(self._frontends)
        if not any(answers.values()):
            raise RuntimeError(f"no metrics from any of {len(answers)} ingress replicas")
        return {
            name: (answer[1] if answer else "") + up_text("ingress", name, answer is not None)
            for name, answer in answers.items()
        }

    def _num_leaving(self) -> int:
        if self._status is None or INGRESS not in self._status.deployments:
            return 0
        return self._status.deployments[INGRESS].replica_states.get(ReplicaState.STOPPING, 0)

    async def _ask(self) -> None:
        if self._question is None or time.monotonic() - self._asked_s > _PERIOD_S:
            self._question = asyncio.create_task(self._listen())
            self._asked_s = time.monotonic()
        await asyncio.shield(self._question)  # a caller that gives up must not cancel it for the others

    async def _listen(self) -> None:
        name = serve.get_replica_context().app_name
        try:
            async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                status = await asyncio.get_running_loop().run_in_executor(self._pool, serve.status)
                self._status = status.applications.get(name, self._status)
        except Exception as error:  # any error of Ray: the controller may be restarting
            logger.warning("Serve's controller did not report the state of this application: %r", error)


def up_text(label: str, name: str, is_up: bool) -> str:
    """Return the series that reports whether a replica answers, with the label that names it."""
    return f'{_HEAD}{UP}{{{label}="{name}"}} {int(is_up)}\n'


class ReplicaTexts(Generic[Text]):
    """Collects the metrics of every replica that Serve knows, and remembers the names of those that have answered.

    Args:
        name_of: returns the replica's name from its answer; empty if the answer has none.
    """

    def __init__(self, name_of: Callable[[Text], str]) -> None:
        self._name_of = name_of
        self._names: dict[Any, str] = {}  # by actor id

    async def read(self, handle: Any) -> dict[str, Text | None]:
        """Return the answer of each replica by its name; None for a replica that does not answer in time.

        `handle` is Serve's `DeploymentHandle`; its own broadcast returns no result until the last one has arrived.
        """
        results = await handle.broadcast("metrics_text")._fetch_replica_results_async()
        answers = [asyncio.ensure_future(result.get_async()) for result in results]
        await asyncio.wait(answers, timeout=TIMEOUT_S)
        names: dict[Any, str] = {}
        texts: dict[str, Text | None] = {}
        for rank, (result, answer) in enumerate(zip(results, answers, strict=True)):
            actor, text = getattr(result, "_actor_id", rank), _outcome(answer)
            names[actor] = (self._names.get(actor) if text is None else self._name_of(text)) or f"unknown-{rank}"
            texts[names[actor]] = text
            if text is None:
                logger.warning("replica %s has not sent its metrics", names[actor])
        self._names = names
        return texts


def _outcome(answer: asyncio.Future[Text]) -> Text | None:
    if not answer.done():
        answer.cancel()
        return None
    return None if answer.cancelled() or answer.exception() is not None else answer.result()
