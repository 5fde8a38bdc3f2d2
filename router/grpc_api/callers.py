"""The callers that gRPC admits, and their places for messages that are being read.

Serve's gRPC servers listen on all addresses of a node, even if clients get only one. In a cluster of one machine the
proxy calls them over loopback, and `LOCAL_PROXY` is set.

A message arrives as slowly as its sender wants, so a place is only lent. While others wait, a place whose message has
not arrived after `grace_s` moves from the caller with the most places to the waiting caller with the fewest.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

from protos.errors import OverloadedError, PermissionDeniedError
from router.api_keys import ApiKeys, Client

if TYPE_CHECKING:  # the command line takes a name from here
    import grpc

LOCAL_PROXY = "OUTRIDER_LOCAL_PROXY"
FORWARDED_FOR = "x-forwarded-for"  # set by the proxy: its caller's address
# Releases the place of the current call's message; called once the message is checked or refused.
leave_place: ContextVar[Callable[[], object]] = ContextVar("leave_place", default=lambda: None)
_LOOPBACK = ("ipv4:127.", "ipv6:[::1]", "ipv6:%5B::1%5D", "unix:")


class CallContext(Protocol):
    """The parts that `grpc.aio.ServicerContext` and `RayServegRPCContext` share."""

    def invocation_metadata(self) -> Any: ...
    def peer(self) -> str: ...
    def set_code(self, code: grpc.StatusCode) -> None: ...
    def set_details(self, details: str) -> None: ...
    def set_trailing_metadata(self, trailing_metadata: Any) -> None: ...


def check_peer(context: CallContext) -> None:
    """Raise PermissionDeniedError for a call from another machine that bypasses this machine's proxy."""
    if os.environ.get(LOCAL_PROXY) == "1" and not context.peer().startswith(_LOOPBACK):
        raise PermissionDeniedError(
            f"This port accepts this machine's proxy only, but the call comes from {context.peer()}; use the gRPC port "
            "of the server, or run a cluster of several machines with `outrider env`."
        )


def authenticate(api_keys: ApiKeys, context: CallContext) -> Client:
    """Set the caller as the current client, and return it.

    Raises:
        AuthenticationError: the key is missing or unknown.
        PermissionDeniedError: the call comes from another machine and bypasses this one's proxy.
    """
    check_peer(context)
    metadata = dict(context.invocation_metadata() or ())
    return api_keys.check(metadata.get("authorization"), metadata.get("x-api-key"))


def address(context: CallContext, *, has_proxy: bool) -> str:
    """Return the address of the caller (in IPv6 its network); through a proxy, the address that the proxy names."""
    peer = unquote(context.peer())
    if has_proxy:
        metadata = dict(context.invocation_metadata() or ())
        peer = str(metadata.get(FORWARDED_FOR, peer))
    host = peer.removeprefix("ipv4:").removeprefix("ipv6:")
    host = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0] if "." in host else host
    try:
        return client_of(ip_of(host))
    except ValueError:
        return "unknown"  # callers without an address share one


def ip_of(host: str) -> IPv4Address | IPv6Address:
    """Return an address without its zone; an IPv4 address in IPv6's form becomes IPv4's. Raises ValueError."""
    found = ip_address(host.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found


def client_of(ip: IPv4Address | IPv6Address) -> str:
    """Return the address of a client, or its IPv6 network of 64 bits, whose addresses belong to one client."""
    return str(ip if ip.version == 4 else ip_network((ip, 64), strict=False))


@dataclass(frozen=True, slots=True)
class ReadingLimits:
    """Limits on the messages read at once: `num_places` in total, `num_of_caller` per caller.

    Attributes:
        grace_s: until a message that has not arrived loses its place to a waiting call.
        wait_s: longest wait for a place.
        read_s: until a message must have arrived, and until its place is released even if it is not checked.
    """

    num_places: int = 16
    num_of_caller: int = 8
    grace_s: float = 1.0
    wait_s: float = 5.0
    read_s: float = 15.0


@dataclass(slots=True, eq=False)
class ReadingPlace:
    """One place; `lost` is done when the place went to another caller, and cancelled when it was released."""

    places: ReadingPlaces
    caller: str
    lost: asyncio.Future[None]
    taken_s: float
    is_read: bool = False  # its message has arrived: the place can no longer be taken away

    def leave(self) -> None:
        """Release the place; idempotent."""
        self.places.leave(self)


class ReadingPlaces:
    """The places of one event loop."""

    def __init__(self, limits: ReadingLimits) -> None:
        self._limits = limits
        self._taken: dict[ReadingPlace, None] = {}  # the longest held first
        self._num_taken: Counter[str] = Counter()
        self._waiting: dict[str, list[asyncio.Future[ReadingPlace]]] = {}  # by caller, the latest call last
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        """Return the number of places in use."""
        return len(self._taken)

    async def take(self, caller: str) -> ReadingPlace:
        """Take a place, waiting for one if necessary. Raises OverloadedError if the wait is too long."""
        if not self._waiting and self._has_room(caller):
            return self._taken_by(caller)
        place: asyncio.Future[ReadingPlace] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(caller, []).append(place)
        # Then the longest waiting call of the caller with the most is refused.
        if sum(map(len, self._waiting.values())) > 1024:
            self._drop_one()
        self._share()
        try:
            await asyncio.wait({place}, timeout=self._limits.wait_s)
        except asyncio.CancelledError:
            if place.done() and place.exception() is None:
                place.result().leave()
            raise
        finally:
            if not place.done():
                self._forget(caller, place)
        if not place.done():
            raise self._refusal()
        return place.result()

    def leave(self, place: ReadingPlace) -> None:
        """Release a place; ignored if it was released or lost."""
        if place in self._taken:
            self._release(place)
            place.lost.cancel()
            self._share()

    def _release(self, place: ReadingPlace) -> None:
        del self._taken[place]
        self._num_taken[place.caller] -= 1
        if not self._num_taken[place.caller]:
            del self._num_taken[place.caller]

    def _forget(self, caller: str, place: asyncio.Future[ReadingPlace]) -> None:
        self._waiting[caller].remove(place)
        if not self._waiting[caller]:
            del self._waiting[caller]

    def _refusal(self) -> OverloadedError:
        return OverloadedError(
            f"{self._limits.num_of_caller} messages of this client, or {self._limits.num_places} in total, are being "
            "read; send this one again later.",
            retry_after_s=self._limits.wait_s,
        )

    def _drop_one(self) -> None:
        caller = max(self._waiting, key=lambda each: len(self._waiting[each]))
        dropped = self._waiting[caller][0]
        self._forget(caller, dropped)
        dropped.set_exception(self._refusal())

    def _share(self) -> None:
        """Give out places while somebody can have one; schedule the next look for when a place can be taken away.

        The callers with the fewest places come first, and of a caller its latest call: if all of its places are held
        up, that is the call whose client still waits.
        """
        if self._timer is not None:
            self._timer.cancel()
        times_s = [math.inf]
        has_given = True
        while has_given and self._waiting:
            has_given = False
            for caller in sorted(self._waiting, key=lambda each: self._num_taken[each]):
                ripe_s = self._make_room(caller)
                if ripe_s is not None:
                    times_s.append(ripe_s)
                    continue
                place = self._waiting[caller][-1]
                self._forget(caller, place)
                place.set_result(self._taken_by(caller))
                has_given = True
        next_s = min(times_s)
        self._timer = None if next_s == math.inf else asyncio.get_running_loop().call_at(next_s, self._share)

    def _make_room(self, caller: str) -> float | None:
        """Return None if the caller can have a place now, if necessary one taken from another message.

        Otherwise return the time when one can be taken away; `inf` if never.
        """
        if self._has_room(caller):
            return None
        slowest = self._slowest(caller)
        if slowest is None:
            return math.inf
        ripe_s = slowest.taken_s + self._limits.grace_s
        if ripe_s > asyncio.get_running_loop().time():
            return ripe_s
        self._release(slowest)
        slowest.lost.set_result(None)
        return None

    def _has_room(self, caller: str) -> bool:
        return len(self._taken) < self._limits.num_places and self._num_taken[caller] < self._limits.num_of_caller

    def _slowest(self, caller: str) -> ReadingPlace | None:
        """Return the place that a caller takes next: its own if it is at its limit, else another caller's."""
        if self._num_taken[caller] >= self._limits.num_of_caller:
            return next((place for place in self._taken if place.caller == caller and not place.is_read), None)
        unread = [place for place in self._taken if not place.is_read]
        most = max((self._num_taken[place.caller] for place in unread), default=0)
        if most <= self._num_taken[caller]:
            return None
        return next(place for place in unread if self._num_taken[place.caller] == most)

    def _taken_by(self, caller: str) -> ReadingPlace:
        loop = asyncio.get_running_loop()
        place = ReadingPlace(self, caller, loop.create_future(), loop.time())
        self._taken[place] = None
        self._num_taken[caller] += 1
        return place
