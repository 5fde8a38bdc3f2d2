"""Select and reserve in one step: look up the prefix, compare loads, choose, and record the work sent.

The choice and its reservation are one call on one state, so a burst that several ingress replicas route at the same
moment spreads as if one had routed it. The caller passes the time; there is no process and no clock here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protos.block_keys import BlockKey
from router.routing.load import FleetLoad, LoadTable, SentWork
from router.routing.policy import Decision, PolicyInput
from router.routing.prefix_index import PrefixIndex

Ranker = Callable[[PolicyInput, FleetLoad], Decision]

_MAX_SESSIONS = 100_000
_GRACE_S = 1.0  # after its predicted first token, while a request's blocks may still be unreported


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """The router's view of a request: the keys of its full blocks and its length, without tokens."""

    request_id: str
    num_tokens: int
    keys: Sequence[BlockKey]
    seed: int = 0
    session_id: str = ""


class Selector:
    """The router's state and its one decision.

    Workers' reports feed `index` and `loads`; `select` reads both and adds the work it has just placed.
    """

    def __init__(self, rank: Ranker, block_size: int, index: PrefixIndex, loads: LoadTable) -> None:
        self.index = index
        self.loads = loads
        self._rank = rank
        self._block_size = block_size
        self._turn = 0
        self._sessions: OrderedDict[str, str] = OrderedDict()

    def select(self, request: RouteRequest, candidates: Sequence[str], now_s: float) -> Decision:
        """Choose among `candidates` (at least one) and reserve: blocks and work count for the chosen worker at once.

        Workers that seem to hang are skipped while there are others.
        """
        self.index.expire(now_s)
        candidates = [each for each in candidates if not self.loads.is_silent(each, now_s)] or candidates
        policy_input = PolicyInput(
            num_tokens=request.num_tokens,
            block_size=self._block_size,
            prefix_blocks=self.index.matches(request.keys),
            seed=request.seed,
            turn=self._turn,
            last_worker_id=self._sessions.get(request.session_id),
        )
        decision = self._rank(policy_input, self.loads.view(candidates, now_s))
        self._reserve(request, decision, now_s)
        return decision

    def _reserve(self, request: RouteRequest, decision: Decision, now_s: float) -> None:
        chosen = decision.ranked(1)[0]
        self._turn += 1
        self.index.reserve(chosen.worker_id, request.keys, now_s, hold_s=chosen.ttft_s + _GRACE_S)
        uncached_tokens = request.num_tokens - chosen.cached_tokens
        self.loads.sent(chosen.worker_id, SentWork(request.request_id, uncached_tokens, now_s))
        self._remember(request.session_id, chosen.worker_id)

    def _remember(self, session_id: str, worker_id: str) -> None:
        if not session_id:
            return
        self._sessions[session_id] = worker_id
        self._sessions.move_to_end(session_id)
        if len(self._sessions) > _MAX_SESSIONS:
            self._sessions.popitem(last=False)
