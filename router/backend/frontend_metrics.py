"""The metrics of all ingress replicas, read through Serve: a scrape reaches any one of them, and needs all."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from router.backend.application_watch import INGRESS


class FrontendMetrics:
    """Asks every replica of the application's ingress, itself included, for its own text."""

    def __init__(self) -> None:
        self._handle: DeploymentHandle[Any] | None = None

    async def read(self) -> Mapping[str, str]:
        """Return the texts of the replicas that answer, by name; the caller sets the deadline.

        Raises:
            RuntimeError: none has answered.
        """
        if self._handle is None:
            name = serve.get_replica_context().app_name
            self._handle = await asyncio.to_thread(serve.get_deployment_handle, INGRESS, name)
        answers = await self._handle.broadcast("metrics_text").results_async(return_exceptions=True)
        texts = dict(answer for answer in answers if not isinstance(answer, BaseException))
        if not texts:
            raise RuntimeError(f"none of {len(answers)} ingress replicas has sent its metrics")
        return texts
