"""The argument of one call to a pair on its way through Serve's router, which adds the route."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protos.messages import GenerateRequest
from router.routing.index.index_messages import RouteReply


@dataclass(frozen=True, slots=True)
class Route:
    """The choice of a pair for a call.

    Attributes:
        decision_s: seconds that the choice took.
        reply: the index's; None where load alone decided.
        failure: the reason for that: timeout, away, error or diverted.
    """

    decision_s: float
    reply: RouteReply | None = None
    failure: str = ""


@dataclass(slots=True)
class RoutedCall:
    """A request, the joined keys of its blocks, and its route, with the numbers behind it where `is_explained`.

    With `wants_holder` the route names the worker that holds more of the prefix than the chosen one.

    Serve hands its router the very objects that the caller passes, in the caller's process; so the router can read the
    keys and set the route, and neither is sent: the pair gets the request alone.
    """

    request: GenerateRequest
    keys: bytes = b""
    is_explained: bool = False
    wants_holder: bool = False
    route: Route | None = None
    withdraw: Callable[[], None] | None = None  # ends the reservation, while there is one
    is_taken: bool = False  # by a pair, whose first token may be long in coming

    def __reduce__(self) -> tuple[object, ...]:
        return _request_alone, (self.request,)


def _request_alone(request: GenerateRequest) -> GenerateRequest:
    return request
