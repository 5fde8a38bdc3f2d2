"""The part of a pair's shell that needs no Ray: admission, streams, and the target's numbers."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace

from actors.pair.admission import PairAdmission
from actors.pair.pair_draft import PairDrafts, require_exchangeable
from actors.pair.pair_metrics import PairMetrics
from actors.pair.target_client import TargetClient
from actors.settings import PairSettings
from actors.shell_messages import Pong
from engine.accounting.drift import DriftStats
from protos.fingerprint import with_draft
from protos.messages import GenerateRequest, ModelCard, TokenChunk
from protos.served_draft import DraftOrder, DraftReport


class DriftAlarms:
    """Belongs to the shell's loop."""

    def __init__(self) -> None:
        self.on_alarm: Callable[[str], None] = _ignore  # called with the class of each new alarm
        self._num_alarms: dict[str, int] = {}
        self.ringing: tuple[str, ...] = ()

    def update(self, classes: Sequence[DriftStats]) -> None:
        """Take in the target's present state. A restarted target counts its alarms from zero."""
        self.ringing = tuple(
            f"acceptance of {each.name} is {each.recent:.3f}, and was {each.reference:.3f}"
            for each in classes
            if each.is_alarming
        )
        for each in classes:
            if each.num_alarms > self._num_alarms.get(each.name, 0):
                self.on_alarm(each.name)
            self._num_alarms[each.name] = each.num_alarms


def _ignore(name: str) -> None:
    """Ignore the alarm."""


class PairShell:
    """Admits requests and passes their tokens on."""

    _client: TargetClient  # a subclass sets it when its target runs

    def __init__(self, settings: PairSettings, metrics: PairMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._admission = PairAdmission(settings.max_requests)
        self._drift_alarms = DriftAlarms()
        self._drafts: PairDrafts | None = None  # the drafts that have their own processes

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[list[TokenChunk], None]:
        """Yield the request's chunks, all that are queued at a time; the last chunk has the finish reason.

        If the ingress listens on this node (`feed_address`), its feed carries the chunks instead of the generator. An
        empty list is a sign of life: the shell runs, and watches its target itself. Closing the generator aborts the
        request.

        Raises:
            OverloadedError: refused, the pair is full.
            ModelChangedError: refused, the request was made for another model.
            UnavailableError: the target is away or died; chunks already yielded stay valid.
        """
        arrived_s = time.monotonic()
        self._admission.enter(request)
        feed = stream = None
        try:
            feed = await self._client.feeds.open(request.feed_address)
            stream = self._client.add(request, feed)
            if request.num_places > 1:
                yield []  # lets the ingress send the request's other choices
            while not stream.is_finished:
                yield await stream.next(timeout_s=5.0)
        finally:
            self._admission.leave(request, time.monotonic() - arrived_s)
            if stream is not None:
                self._client.drop(request.request_id)
                if feed is not None:
                    feed.detach(stream)

    async def describe(self) -> ModelCard:
        """Return the model's card, with the active alarms. Raises UnavailableError without a target."""
        card = replace(self._client.require_card(), alarms=self._drift_alarms.ringing)
        if self._drafts is None:
            return card
        reports, own = self._drafts.reports, self._settings.draft
        digests = (*(() if own.model is not None else (own.method,)), *(each.digest for each in reports))
        return replace(card, fingerprint=with_draft(card.fingerprint, *digests), draft=reports[0])

    async def metrics_text(self) -> str:
        """Return this replica's metrics in Prometheus text format, as they are now."""
        if self._client.is_connected:
            self._on_pong(await self._client.ping(self._settings.pong_timeout_s))
        return self._metrics.text()

    async def kill_draft(self) -> bool:
        """Kill the drafts' processes, as a fault would. Return False if no draft has its own process."""
        return False

    async def order_draft(self, order: DraftOrder) -> tuple[DraftReport, ...]:
        """Carry out an order about a draft, and return the running drafts.

        Raises:
            RequestError: no draft has a process of its own, or the order cannot be carried out.
            ConflictError: another order is running.
            DeadlineExceededError: the new draft did not serve in time; the old one runs, or is starting.
        """
        require_exchangeable(self._settings.draft, has_process=self._drafts is not None)
        assert self._drafts is not None, "as required"
        return await self._drafts.carry_out(order)

    def _on_pong(self, pong: Pong) -> None:
        self._drift_alarms.update(pong.engine.drift)
        drafts = () if self._drafts is None else self._drafts.reports
        self._metrics.update(pong, self._admission.num_refused, drafts)
