"""The metrics of all ingress replicas, collected through Serve: a scrape reaches one replica and needs all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from router.backend.application_watch import INGRESS
from router.backend.replica_texts import ReplicaTexts, up_text


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
