"""The metrics of all ingress replicas, read through Serve: a scrape reaches any one of them, and needs all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from router.backend.application_watch import INGRESS
from router.backend.replica_texts import ReplicaTexts, up_text


class FrontendMetrics:
    """Asks every replica of the application's ingress, itself included, for its own text."""

    def __init__(self) -> None:
        self._handle: DeploymentHandle[Any] | None = None
        self._texts: ReplicaTexts[tuple[str, str]] = ReplicaTexts(lambda answer: answer[0])

    async def read(self) -> Mapping[str, str]:
        """Return the text of each replica by its name; of one that does not answer, the series alone that says so.

        Raises:
            RuntimeError: none has answered.
        """
        if self._handle is None:
            name = serve.get_replica_context().app_name
            self._handle = await asyncio.to_thread(serve.get_deployment_handle, INGRESS, name)
        answers = await self._texts.read(self._handle)
        if not any(answers.values()):
            raise RuntimeError(f"none of {len(answers)} ingress replicas has sent its metrics")
        return {
            name: (answer[1] if answer else "") + up_text("ingress", name, answer is not None)
            for name, answer in answers.items()
        }
