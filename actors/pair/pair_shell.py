"""The part of a pair's shell that needs no Ray: admission, streams, and the watch over the target."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from actors.pair.pair_draft import PairDraft, PairDrafts
from actors.pair.pair_metrics import PairMetrics
from actors.pair.target_client import PONG_TIMEOUT_S, TargetClient, TargetHead
from actors.settings import DraftSettings, PairSettings
from actors.shell_messages import Pong
from actors.target.engine_loop import STEP_TIMEOUT_S
from engine.accounting.drift import DriftStats
from protos.errors import OverloadedError, RequestError, UnavailableError
from protos.messages import GenerateRequest, SpeculationMethod, TokenChunk
from protos.served_model import DraftOrder, DraftReport, ModelCard, with_draft


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
        self._drafts: PairDrafts | None = None  # those that can be exchanged

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
        own_method = () if own.method in self._drafts.by_method else (own.method,)
        digests = (*own_method, *(each.digest for each in reports))
        return replace(card, fingerprint=with_draft(card.fingerprint, *digests), draft=reports[0])

    async def metrics_text(self) -> str:
        """Return this replica's metrics in Prometheus text format, as they are now."""
        if self._client.is_connected:
            self._on_pong(await self._client.ping())
        return self._metrics.text()

    async def kill_draft(self) -> bool:
        """Kill the drafts' processes, as a fault would. Return False if no draft has its own process."""
        return False

    async def order_draft(self, order: DraftOrder) -> tuple[DraftReport, ...]:
        """Carry out an order about a draft, and return the running drafts.

        Raises:
            RequestError: no draft can be exchanged, or the order cannot be carried out.
            ConflictError: another order is running.
            DeadlineExceededError: the new draft did not serve in time; the old one runs, or is starting.
        """
        if self._drafts is None:
            raise refusal(self._settings.draft)
        return await self._drafts.carry_out(order)

    async def _head_draft(self, replica: str) -> list[PairDraft]:
        """Return the pair's head as a draft that can be replaced, if it has files of its own."""
        config = self._settings.engine.head
        if config is None or config.path is None:
            return []
        head = TargetHead(self._client)
        running, method = await head.running(), self._settings.draft.method
        report = DraftReport(replica, config.path, running.digest, time.time(), is_deployed=True, method=method)
        return [PairDraft(head, report, head.goodput)]

    def _on_pong(self, pong: Pong) -> None:
        self._drift_alarms.update(pong.engine.drift)
        if pong.head is not None and self._drafts is not None:
            self._drafts.first.note_head(pong.head)
        drafts = () if self._drafts is None else self._drafts.reports
        self._metrics.update(pong, self._admission.num_refused, drafts)


def refusal(draft: DraftSettings) -> RequestError:
    """Return the reason why a pair has no draft that can be replaced."""
    if draft.kind is SpeculationMethod.MODEL:
        return RequestError(
            "The draft model runs in the target's process here, so it cannot be replaced alone; deploy with "
            "draft.gpu: own (and without --no-ray) to replace it while the pair serves."
        )
    if draft.kind.can_branch:
        return RequestError(
            f"draft.kind is '{draft.kind}', whose weights are the target's own, so there is nothing to replace; change "
            "draft or target in deploy.yaml and deploy again."
        )
    return RequestError(f"draft.kind is '{draft.kind}', which has no weights, so there is no draft model to replace.")


@dataclass(slots=True)
class _TenantLoad:
    """A tenant with requests inside, or refused recently."""

    weight: float
    num_inside: int = 0
    refused_s: float = -math.inf
    num_wanted: int = 1  # places of the request refused last


@dataclass(frozen=True, slots=True)
class _Reservation:
    """Places for the choices of one request that have not arrived yet."""

    tenant: str
    num_places: int
    until_s: float


class PairAdmission:
    """Counts requests, and computes Retry-After from their recent duration.

    The first choice of a request names the number of its choices. There is a place for each, or the request is refused
    before any of them runs. The other choices are never refused, and neither is a request that moves here from a lost
    pair.

    While a tenant is refused, free places are kept for it, up to its share of all places by weight. Otherwise tenants
    would be admitted as often as they send requests, and served at that rate whatever their weights.
    """

    def __init__(
        self,
        max_requests: int,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`jitter` is in [0, 1)."""
        self.num_refused = 0
        self._max_requests = max_requests
        self._clock = clock
        self._jitter = jitter
        self._tenants: dict[str, _TenantLoad] = {}
        self._reserved: dict[str, _Reservation] = {}  # by group
        self._usual_duration_s = 1.0

    def enter(self, request: GenerateRequest) -> None:
        """Take a place.

        Raises:
            OverloadedError: there are not enough places.
        """
        tenant = self._tenants.setdefault(request.tenant, _TenantLoad(request.weight))
        tenant.weight = request.weight
        if request.is_admitted:
            self._use_reserved(request.group_id)
        else:
            self._check(request, tenant)
            if request.num_places > 1:
                # The request's other choices may arrive until then; they may go to other pairs.
                until_s = self._clock() + 5.0
                self._reserved[request.group_id] = _Reservation(request.tenant, request.num_places - 1, until_s)
        tenant.num_inside += 1

    def leave(self, request: GenerateRequest, duration_s: float) -> None:
        """Free the place of a request, which has taken `duration_s`.

        The end of a request's first choice also frees the places kept for its other choices, which enter anyway.
        """
        self._tenants[request.tenant].num_inside -= 1
        if request.num_places > 1:
            self._reserved.pop(request.group_id, None)
        self._usual_duration_s += 0.1 * (duration_s - self._usual_duration_s)

    def _check(self, request: GenerateRequest, tenant: _TenantLoad) -> None:
        """Refuse a request without room. A request with more choices than places needs an empty pair."""
        now_s = self._clock()
        self._forget(now_s, request.tenant)
        num_taken = self._num_taken()
        num_kept = self._num_kept_from(request.tenant, now_s)
        if num_taken and num_taken + num_kept + request.num_places > self._max_requests:
            self.num_refused += 1
            tenant.refused_s, tenant.num_wanted = now_s, request.num_places
            asked = f"; this request has {request.num_places} choices" if request.num_places > 1 else ""
            raise OverloadedError(
                f"{num_taken} requests are running or queued, and this pair takes {self._max_requests}{asked}; "
                "send it again later, or raise pair.max_queued_requests or pair.num_replicas",
                retry_after_s=self._retry_after_s(num_taken + num_kept + request.num_places - self._max_requests),
            )

    def _forget(self, now_s: float, newcomer: str) -> None:
        self._reserved = {group: each for group, each in self._reserved.items() if each.until_s > now_s}
        self._tenants = {
            name: tenant
            for name, tenant in self._tenants.items()
            if name == newcomer or tenant.num_inside or self._is_wanting(tenant, now_s)
        }

    def _num_taken(self) -> int:
        reserved = sum(each.num_places for each in self._reserved.values())
        return reserved + sum(tenant.num_inside for tenant in self._tenants.values())

    def _num_kept_from(self, newcomer: str, now_s: float) -> int:
        """Return the places kept from this tenant: the unfilled shares of other tenants that want places.

        Nothing is kept for a request larger than its tenant's unfilled share: it would wait next to idle places.
        """
        weights = sum(tenant.weight for tenant in self._tenants.values())
        num_kept = 0
        for name, tenant in self._tenants.items():
            if name != newcomer and self._is_wanting(tenant, now_s):
                num_lacking = int(self._max_requests * tenant.weight / weights) - self._num_taken_by(name)
                num_kept += num_lacking if num_lacking >= tenant.num_wanted else 0
        return num_kept

    def _num_taken_by(self, name: str) -> int:
        reserved = sum(each.num_places for each in self._reserved.values() if each.tenant == name)
        return reserved + self._tenants[name].num_inside

    @staticmethod
    def _is_wanting(tenant: _TenantLoad, now_s: float) -> bool:
        return now_s - tenant.refused_s < 2.0  # after a refusal a tenant counts as still wanting places

    def _retry_after_s(self, num_missing: int) -> float:
        """Predict the time until `num_missing` places are free, if each is freed once per usual duration."""
        wait_s = max(1.0, num_missing * self._usual_duration_s / self._max_requests)
        return round(wait_s * (1 + 0.25 * self._jitter()), 1)  # requests refused together do not return together

    def _use_reserved(self, group_id: str) -> None:
        reserved = self._reserved.pop(group_id, None)
        if reserved is not None and reserved.num_places > 1:
            self._reserved[group_id] = _Reservation(reserved.tenant, reserved.num_places - 1, reserved.until_s)


logger = logging.getLogger(__name__)

_RESTART_TIMEOUT_S = 300.0  # for a target or a draft to come back


class Watchdog:
    """Pings the target once a second. Fences and restarts a target that does not respond or makes no progress.

    A draft that is silent for longer than a restart may take is restarted too.

    Args:
        client: the connection to the target.
        restart: kills the target's process.
        on_pong: gets every `Pong`.
        restart_draft: kills the process of a method's draft.
        clock: seconds.
    """

    def __init__(
        self,
        client: TargetClient,
        restart: Callable[[], None],
        on_pong: Callable[[Pong], None],
        restart_draft: Callable[[str], object] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._restart = restart
        self._on_pong = on_pong
        self._clock = clock
        self._restart_draft = restart_draft
        self._seen_at_s = clock()
        self._began_at_s = clock()
        self._drafts_restarted_at_s: dict[str, float] = {}

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            if self._client.is_connected:
                await self._check_target()

    def check(self) -> None:
        """Raise UnavailableError if the target has been away for longer than a restart may take."""
        away_s = self._clock() - self._seen_at_s
        if away_s > _RESTART_TIMEOUT_S:
            raise UnavailableError(
                f"the target has not been seen for {away_s:.0f} s, and a restart may take "
                f"{_RESTART_TIMEOUT_S:.0f} s; look for TargetActor in Ray's logs"
            )

    async def _check_target(self) -> None:
        try:
            pong = await self._client.ping()
        except UnavailableError:
            return  # the target has just died, and the client has dropped it
        except TimeoutError:
            self._give_up(f"it did not answer a ping within {PONG_TIMEOUT_S:g} s")
            return
        self._seen_at_s = self._clock()
        self._on_pong(pong)
        for method, draft in pong.drafts.items():
            self._check_draft(method, draft.silent_s)
        if pong.stalled_s > STEP_TIMEOUT_S:
            self._give_up(f"it has work and made no progress for {pong.stalled_s:.0f} s")

    def _check_draft(self, method: str, silent_s: float) -> None:
        now_s = self._clock()
        if min(silent_s, now_s - self._drafts_restarted_at_s.get(method, self._began_at_s)) > _RESTART_TIMEOUT_S:
            logger.error("restarting the draft %s: it has been silent for %.0f s", method, silent_s)
            self._drafts_restarted_at_s[method] = now_s
            self._restart_draft(method)

    def _give_up(self, reason: str) -> None:
        logger.error("restarting the target: %s", reason)
        self._client.fence()
        self._restart()


def check_running(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Raise UnavailableError if a task that should run forever has ended. Nothing else would notice."""
    for task in tasks:
        if task.done():
            reason = "cancelled" if task.cancelled() else repr(task.exception())
            raise UnavailableError(f"{task.get_name()} of this pair has ended: {reason}")
