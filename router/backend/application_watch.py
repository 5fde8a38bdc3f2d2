"""The state of the application, as Serve's controller reports it, and the metrics of every replica that it knows.

Serve lets a call wait for a replica even if none will ever start. It also lets a replica that is being replaced serve
its open connections until they close. Each replica's metrics have a time-out: a hanging replica hides only itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, ApplicationStatusOverview, ReplicaState  # type: ignore[attr-defined]  # imported there

logger = logging.getLogger(__name__)

INGRESS = "Ingress"
_PERIOD_S = 2.0
_ANSWER_TIMEOUT_S = 5.0
TIMEOUT_S = 2.0  # for a replica's metrics
UP = "outrider_replica_up"
_HEAD = f"# HELP {UP} 1: the replica has sent its metrics within {TIMEOUT_S:g} s; 0: it has not.\n# TYPE {UP} gauge\n"


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


Text = TypeVar("Text")


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
