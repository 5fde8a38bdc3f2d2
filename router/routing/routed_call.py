"""The argument of one call to a pair, as it travels through Serve's router: it picks its route up on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protos.messages import GenerateRequest
from router.routing.index.index_messages import RouteAnswer


@dataclass(frozen=True, slots=True)
class Route:
    """How a call found its pair. `answer` is the index's; without one `failure` says why, and load alone decided."""

    decision_s: float
    answer: RouteAnswer | None = None
    failure: str = ""  # timeout, away or error


@dataclass(slots=True)
class RoutedCall:
    """A request, the names of its blocks, and what became of it.

    Serve hands its router the very objects that the caller passes, in the caller's process; so the router can read the
    keys and leave the route, and nothing of either is sent: the pair gets the request alone.
    """

    request: GenerateRequest
    keys: bytes = b""
    route: Route | None = None
    withdraw: Callable[[], None] | None = None  # ends the reservation, while there is one
    is_taken: bool = False  # by a pair, whose first token may be long in coming

    def __reduce__(self) -> tuple[object, ...]:
        return _request_alone, (self.request,)


def _request_alone(request: GenerateRequest) -> GenerateRequest:
    return request
