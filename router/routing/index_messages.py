"""The messages between an ingress replica and the index about one request."""

from __future__ import annotations

from dataclasses import dataclass

from protos.worker_load import PrefixHolder
from router.routing.audit import RouteForecast


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
class RouteReply(RouteForecast):
    """The serving candidates, best first, and the index's knowledge at the time of the choice.

    Attributes:
        worker_ids: the first one is reserved, and the forecast is for it.
        formula: the cost with its numbers, if the query `is_explained`.
        num_known_blocks: distinct blocks in the index.
        num_doubtful_workers: workers with an outstanding snapshot.
        holder: a candidate that holds more of the prefix than the chosen one, if requested and there is one.
    """

    worker_ids: tuple[str, ...]
    formula: str
    num_known_blocks: int
    num_doubtful_workers: int
    holder: PrefixHolder | None = None
