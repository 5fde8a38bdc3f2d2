"""What an ingress replica and the index say to each other about one request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RouteAsk:
    """Choose one of `candidates` and reserve it.

    Attributes:
        num_tokens: of the prompt, and of what was generated before the request moved.
        keys: joined names of the full blocks of those tokens; empty routes by load.
        refused_by: the worker that was chosen for this request before and did not take it; its reservation ends.
        wants_formula: fill `RouteAnswer.formula`.
    """

    request_id: str
    num_tokens: int
    keys: bytes
    session_id: str
    candidates: tuple[str, ...]
    refused_by: str | None = None
    wants_formula: bool = False


@dataclass(frozen=True, slots=True)
class RouteAnswer:
    """The candidates that serve, best first, and what the index knew when it chose.

    Attributes:
        worker_ids: the first of them is reserved.
        predicted_blocks: leading blocks of the request that the first one holds or will soon.
        achievable_blocks: the most that any candidate does.
        cost_s: of the first one; `runner_up_cost_s` is the second's, infinite where there is none.
        block_prefill_s: seconds the first one computes on one block.
        formula: the cost with its numbers, where asked for.
        num_known_blocks: distinct blocks in the index.
        num_doubtful_workers: those whose snapshot is still to come.
    """

    worker_ids: tuple[str, ...]
    predicted_blocks: int
    achievable_blocks: int
    cost_s: float
    runner_up_cost_s: float
    block_prefill_s: float
    formula: str
    num_known_blocks: int
    num_doubtful_workers: int
