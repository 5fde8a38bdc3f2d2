"""Copies KV blocks from one prefill replica to another, which then computes only uncached tokens.

                     order, and the replica A that holds its first blocks
pair  ------------------------------------------------------------------>  replica B  ---- copy ---->  replica A
pair  <------------------------------------------------------------------  replica B  <-- blocks ----  replica A
                     A's blocks and the following blocks, which B computes
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from actors.kv_transfer.kv_transport import PrefillTransport
from actors.kv_transfer.nixl_carrier import NixlCarrier
from engine.remote_prefill.kv_transfer import FetchOrder
from protos.worker_load import PrefixHolder

if TYPE_CHECKING:  # takes a second to import, and not every process calls a deployment
    from ray.serve.handle import DeploymentHandle


class PeerTransport(PrefillTransport):
    """Fetches a prompt's cached blocks from another replica by its method `copy`, which computes nothing.

    `expect` and `forget` may be called from any thread.
    """

    _method = "copy"

    def __init__(self, peers: DeploymentHandle[Any], carrier: NixlCarrier | None = None) -> None:
        super().__init__(peers, carrier)
        self._holders: dict[str, PrefixHolder] = {}

    def expect(self, request_id: str, holder: PrefixHolder) -> None:
        """Fetch a request's first blocks from `holder`. Call it before the engine gets the request."""
        self._holders[request_id] = holder

    def forget(self, request_id: str) -> None:
        """Fetch no more blocks of this request."""
        self._holders.pop(request_id, None)

    def num_available_blocks(self, request_id: str) -> int:
        holder = self._holders.get(request_id)
        return holder.num_blocks if holder else 0

    def _more(self, order: FetchOrder) -> dict[str, Any]:
        return {"holder_id": self._holders[order.request_id].worker_id}
