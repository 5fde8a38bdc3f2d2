"""The metrics of every replica, each with its own time-out: a hanging replica hides only itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from ray import serve
from ray.serve.handle import DeploymentHandle

from router.backend.application_watch import INGRESS

logger = logging.getLogger(__name__)
TIMEOUT_S = 2.0
UP = "outrider_replica_up"
_HEAD = f"# HELP {UP} 1: the replica has sent its metrics within {TIMEOUT_S:g} s; 0: it has not.\n# TYPE {UP} gauge\n"
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


class FrontendMetrics:
    """Collects the metrics text of every ingress replica of the application, itself included."""

    def __init__(self) -> None:
        self._handle: DeploymentHandle[Any] | None = None
        self._texts: ReplicaTexts[tuple[str, str]] = ReplicaTexts(lambda answer: answer[0])

    async def read(self) -> Mapping[str, str]:
        """Return each replica's text by its name; for a silent replica, only the series that reports it as down.

        Raises:
            RuntimeError: no replica answered.
        """
        if self._handle is None:
            name = serve.get_replica_context().app_name
            self._handle = await asyncio.to_thread(serve.get_deployment_handle, INGRESS, name)
        answers = await self._texts.read(self._handle)
        if not any(answers.values()):
            raise RuntimeError(f"no metrics from any of {len(answers)} ingress replicas")
        return {
            name: (answer[1] if answer else "") + up_text("ingress", name, answer is not None)
            for name, answer in answers.items()
        }
