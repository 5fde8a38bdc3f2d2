"""The argument of one call to a pair; Serve's router adds the route to it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protos.messages import GenerateRequest
from router.routing.index_messages import RouteReply


@dataclass(frozen=True, slots=True)
class Route:
    """The choice of a pair for a call.

    Attributes:
        decision_s: duration of the choice in seconds.
        reply: the index's reply; None if load alone decided.
        failure: why load alone decided: timeout, away, error or diverted.
    """

    decision_s: float
    reply: RouteReply | None = None
    failure: str = ""


@dataclass(slots=True)
class RoutedCall:
    """A request, the joined keys of its blocks, and its route, with the cost formula if `is_explained`.

    With `wants_holder` the route names a worker that holds more of the prefix than the chosen one.

    Serve passes the caller's own objects to its router, in the caller's process. The router can thus read the keys and
    set the route, and only the request is sent to the pair.
    """

    request: GenerateRequest
    keys: bytes = b""
    is_explained: bool = False
    wants_holder: bool = False
    route: Route | None = None
    withdraw: Callable[[], None] | None = None  # ends the reservation, while there is one
    is_taken: bool = False  # by a pair; the first token may take long
    is_over: bool = False  # its caller has left: a choice that is made later reserves nothing

    def __reduce__(self) -> tuple[object, ...]:
        return _request_alone, (self.request,)


def _request_alone(request: GenerateRequest) -> GenerateRequest:
    return request
