"""Access to the index for pairs and ingress replicas: with a deadline, and with pauses while it does not answer."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayError

from protos.backoff import BackoffGate
from protos.block_keys import WorkerReport
from protos.errors import UnavailableError
from router.config import RouterConfig
from router.routing.index_actor import IndexActor
from router.routing.routed_call import RouteQuery, RouteReply

logger = logging.getLogger(__name__)

_NAMESPACE = "outrider"

Reply = TypeVar("Reply")


class IndexTimeoutError(UnavailableError):
    """The index did not answer in time."""


class IndexClient:
    """The index of one application, found by name, and started by its first user.

    The name includes a digest of the configuration, so a deployment with another policy or block size gets its own
    index.

    Args:
        application: name of the Serve application.
        config: the index's configuration.
        connect: returns the actor's handle; it may block and runs in a thread.
        clock: seconds, for the pauses.
    """

    def __init__(
        self,
        application: str,
        config: RouterConfig,
        connect: Callable[[str, RouterConfig], Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        digest = hashlib.blake2b(repr(config).encode(), digest_size=4).hexdigest()
        self._name = f"outrider-index-{application}-{digest}"
        self._config = config
        self._connect = connect or _get_or_create
        self._gate = BackoffGate(first_s=0.1, longest_s=2.0, clock=clock)  # a late reply ends a pause without queries
        self._actor: Any = None
        self._connecting: asyncio.Task[Any] | None = None

    def warm_up(self) -> None:
        """Find the index in the background, ahead of the first request; does nothing without an event loop."""
        with suppress(RuntimeError):
            self._connecting = asyncio.get_running_loop().create_task(self._find(), name="index-connect")

    async def select(self, query: RouteQuery) -> RouteReply:
        """Choose and reserve.

        Raises:
            UnavailableError: no reply within `index_timeout_s`, or the last query failed a moment ago.
        """
        if not self._gate.is_open:
            raise UnavailableError("the index has just failed to answer")

        def take_back(reply: RouteReply) -> None:
            self.withdraw(reply.worker_ids[0], query.request_id)

        return await self._call(lambda actor: actor.select.remote(query), self._config.index_timeout_s, take_back)

    async def report(self, report: WorkerReport) -> bool:
        """Send a worker's report; True requests its snapshot.

        Raises:
            UnavailableError: no reply within two seconds.
        """
        return await self._call(lambda actor: actor.report.remote(report), timeout_s=2.0)

    def withdraw(self, worker_id: str, request_id: str) -> None:
        """End a reservation, without waiting for a reply; does nothing without an index."""
        self._send(lambda actor: actor.withdraw.remote(worker_id, request_id))

    def forget(self, worker_id: str) -> None:
        """Report that a worker has left, without waiting for a reply."""
        self._send(lambda actor: actor.forget.remote(worker_id))

    def _send(self, send: Callable[[Any], object]) -> None:
        if self._actor is not None:
            try:
                send(self._actor)
            except RayError as error:
                logger.debug("the index did not get a message: %s", error)

    async def _call(
        self,
        send: Callable[[Any], Awaitable[Reply]],
        timeout_s: float,
        on_late: Callable[[Reply], None] = lambda reply: None,
    ) -> Reply:
        """Return the actor's reply; `on_late` gets one that comes after the deadline."""
        answering: asyncio.Future[Reply] | None = None
        try:
            async with asyncio.timeout(timeout_s):
                # Shielded: a late reply still reaches `on_late`.
                answering = asyncio.ensure_future(send(await self._connected()))
                reply = await asyncio.shield(answering)
        except (TimeoutError, asyncio.CancelledError) as error:
            if answering is not None:
                answering.add_done_callback(partial(self._late, on_late))
            if isinstance(error, asyncio.CancelledError):
                raise
            self._gate.failed()
            raise IndexTimeoutError(f"the index did not answer within {timeout_s} s") from None
        except RayActorError as error:
            self._actor = None  # it may have exited for good; the name leads to a new one
            self._gate.failed()
            raise UnavailableError(f"the index is gone: {error}") from error
        except (RayError, ValueError) as error:
            self._gate.failed()
            raise UnavailableError(f"the index failed: {error}") from error
        self._gate.succeeded()
        return reply

    def _late(self, on_late: Callable[[Reply], None], answering: asyncio.Future[Reply]) -> None:
        """Handle a reply after its deadline: the index is alive, so the pause ends."""
        if not answering.cancelled() and answering.exception() is None:
            self._gate.succeeded()
            on_late(answering.result())

    async def _connected(self) -> Any:
        if self._actor is None:
            if self._connecting is None:
                self._connecting = asyncio.create_task(self._find(), name="index-connect")
            try:
                self._actor = await asyncio.shield(self._connecting)
            finally:
                if self._connecting.done():
                    self._connecting = None
        return self._actor

    async def _find(self) -> Any:
        return await asyncio.to_thread(self._connect, self._name, self._config)


def open_prefill_index(application: str, config: RouterConfig) -> IndexClient:
    """Return the index of an application's prefill replicas, separate from the index of its pairs."""
    # A safe estimate: the replica has measured it, and computes where that is faster.
    return IndexClient(f"{application}-prefill", replace(config, fetch_share=0.5))


def _get_or_create(name: str, config: RouterConfig) -> Any:
    """Return the actor with this name. It needs no CPU of its own, and Ray restarts it on any node."""
    options = {"name": name, "namespace": _NAMESPACE, "get_if_exists": True, "lifetime": "detached"}
    return ray.remote(IndexActor).options(**options, max_restarts=-1, num_cpus=0).remote(config)
