"""One call on its way to a pair: the query to the index, its reply, and the route that Serve's router adds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from protos.block_keys import PrefixHolder
from protos.messages import GenerateRequest


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """Choose one of `candidates` and reserve it.

    Attributes:
        num_tokens: of the prompt, plus those generated before the request moved.
        keys: joined keys of the full blocks of these tokens; empty routes by load.
        refused_by: the worker chosen earlier for this request that did not take it; its reservation ends.
        is_explained: the reply includes the `formula`.
        wants_holder: the reply includes the `holder`.
    """

    request_id: str
    num_tokens: int
    keys: bytes
    session_id: str
    candidates: tuple[str, ...]
    refused_by: str | None = None
    is_explained: bool = False
    wants_holder: bool = False


@dataclass(frozen=True, slots=True)
class RouteReply:
    """The choice for one request, and the index's knowledge at that time.

    Attributes:
        predicted_blocks: leading blocks of the request that the chosen worker holds or will soon.
        achievable_blocks: the most that any candidate holds.
        cost_s: predicted cost of the chosen worker.
        runner_up_cost_s: predicted cost of the best other candidate; infinite without another.
        block_prefill_s: seconds the chosen worker needs to compute one block.
        worker_ids: the serving candidates, best first; the first one is chosen and reserved.
        formula: the cost with its numbers, if the query `is_explained`.
        num_known_blocks: distinct blocks in the index.
        num_doubtful_workers: workers with an outstanding snapshot.
        holder: a candidate that holds more of the prefix than the chosen one, if requested and there is one.
    """

    predicted_blocks: int
    achievable_blocks: int
    cost_s: float
    runner_up_cost_s: float
    block_prefill_s: float
    worker_ids: tuple[str, ...]
    formula: str
    num_known_blocks: int
    num_doubtful_workers: int
    holder: PrefixHolder | None = None


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
