"""The texts of finished requests, for drafts of the same tenant's requests, within a fixed memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import takewhile

from engine.proposer.text_match.suffix_index import SuffixIndex


@dataclass(frozen=True, slots=True)
class NoiseId:
    """Identifies a sequence's noise: two sequences with one id draw the same numbers at each position."""

    seed: int
    sample_index: int


@dataclass(slots=True)
class _TenantTexts:
    index: SuffixIndex
    noise_ends: dict[NoiseId, int] = field(default_factory=dict)  # noise -> end of its last text, oldest first


class SharedTexts:
    """The latest texts of each tenant, at most `max_tokens` in all.

    A tenant above the limit loses its own oldest tokens. If all tenants together are above it, the tenants that were
    used longest ago lose everything first. Tenants have separate indices: no draft comes from another tenant's text.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tenants: OrderedDict[str, _TenantTexts] = OrderedDict()  # the least recently used first
        self.num_tokens = 0

    def add(self, tenant_id: str, noise_id: NoiseId, token_ids: Seq[int]) -> None:
        """Add a finished text."""
        tenant = self._tenants.setdefault(tenant_id, _TenantTexts(SuffixIndex(self._max_tokens)))
        self._tenants.move_to_end(tenant_id)
        num_before = len(tenant.index)
        tenant.index.extend(token_ids)
        tenant.index.end_text()
        tenant.noise_ends.pop(noise_id, None)
        tenant.noise_ends[noise_id] = tenant.index.end
        _drop_forgotten(tenant)
        self.num_tokens += len(tenant.index) - num_before
        self._evict()

    def of(self, tenant_id: str) -> SuffixIndex | None:
        """Return the tenant's texts; None if it has no texts."""
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            return None
        self._tenants.move_to_end(tenant_id)
        return tenant.index

    def has_noise(self, tenant_id: str, noise_id: NoiseId) -> bool:
        """True if the tenant has a text that was sampled with this noise."""
        tenant = self._tenants.get(tenant_id)
        return tenant is not None and noise_id in tenant.noise_ends

    def _evict(self) -> None:
        while self.num_tokens > self._max_tokens:
            _, tenant = self._tenants.popitem(last=False)
            self.num_tokens -= len(tenant.index)


def _drop_forgotten(tenant: _TenantTexts) -> None:
    is_forgotten = takewhile(lambda each: each[1] <= tenant.index.start, tenant.noise_ends.items())
    for noise_id, _ in list(is_forgotten):
        del tenant.noise_ends[noise_id]
