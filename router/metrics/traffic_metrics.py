"""Acceptance by tenant and route; the number of series is bounded."""

from __future__ import annotations

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter

from protos.messages import SpeculationStats

_MOST_TENANTS = 32
_OTHERS = "other"  # all further tenants
_NOBODY = "none"  # a client without a key
_LONGEST_NAME = 32  # a key without a name is its own tenant, named by its digest


@dataclass(frozen=True, slots=True)
class Traffic:
    """The class of a request; `route` must come from a fixed set."""

    tenant: str = ""
    route: str = "completion"


class TrafficMetrics:
    """The `outrider_spec_decode_traffic_*` families of one ingress replica, counted when a sequence ends."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._tenants: dict[str, str] = {}
        self._passes = self._counter("passes", "Verification passes of ended sequences, by tenant and route.", registry)
        self._drafted = self._counter("draft_tokens", "Draft tokens verified in these passes.", registry)
        self._accepted = self._counter("accepted_tokens", "Draft tokens accepted in these passes.", registry)

    def count(self, traffic: Traffic, stats: SpeculationStats) -> None:
        """Count the passes of a sequence that has ended."""
        if stats.num_passes == 0:
            return
        labels = (self._label(traffic.tenant), traffic.route)
        self._passes.labels(*labels).inc(stats.num_passes)
        self._drafted.labels(*labels).inc(stats.num_draft_tokens)
        self._accepted.labels(*labels).inc(stats.num_accepted_tokens)

    def _label(self, tenant: str) -> str:
        """Return a tenant's own name for the first tenants, and one shared label for later ones."""
        if tenant in self._tenants:
            return self._tenants[tenant]
        if len(self._tenants) >= _MOST_TENANTS:
            return _OTHERS
        label = tenant or _NOBODY
        self._tenants[tenant] = label if len(label) <= _LONGEST_NAME else f"key-{label[:8]}"
        return self._tenants[tenant]

    @staticmethod
    def _counter(name: str, text: str, registry: CollectorRegistry) -> Counter:
        return Counter(f"outrider_spec_decode_traffic_{name}", text, ("tenant", "route"), registry=registry)
