"""The messages between an ingress replica and the index about one request."""

from __future__ import annotations

from dataclasses import dataclass

from protos.worker_load import PrefixHolder
from router.routing.audit import RouteForecast


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """Choose one of `candidates` and reserve it.

    Attributes:
        num_tokens: of the prompt, and of what was generated before the request moved.
        keys: joined keys of the full blocks of those tokens; empty routes by load.
        refused_by: the worker that was chosen for this request before and did not take it; its reservation ends.
        is_explained: the reply has the `formula`.
        wants_holder: the reply has the `holder`.
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
    """The candidates that serve, best first, and the index's knowledge at the choice.

    Attributes:
        worker_ids: the first of them is reserved, and the forecast is for it.
        formula: the cost with its numbers, where the query `is_explained`.
        num_known_blocks: distinct blocks in the index.
        num_doubtful_workers: workers whose snapshot is still to come.
        holder: the candidate with more of the prefix than the chosen one, where there is one and the query wants it.
    """

    worker_ids: tuple[str, ...]
    formula: str
    num_known_blocks: int
    num_doubtful_workers: int
    holder: PrefixHolder | None = None
