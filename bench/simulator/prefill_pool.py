"""Workers that only prefill, and the move of their KV to the worker that decodes."""

from __future__ import annotations

import heapq

from bench.simulator.rates import ServingRates


class PrefillPool:
    """A shared queue before `num_workers` prefill workers, each at the full prefill rate, as nothing decodes there.

    Blocks move while later ones are computed, so what is left after the last is computed is the latency and, where the
    network is slower than prefill, its backlog.
    """

    def __init__(self, num_workers: int, rates: ServingRates) -> None:
        self.busy_s = 0.0
        self._rates = rates
        self._free_at_s = [0.0] * num_workers  # a heap

    def duration_s(self, now_s: float, num_tokens: int) -> float:
        """Seconds until the KV of a prompt that came now would have arrived."""
        wait_s = max(self._free_at_s[0] - now_s, 0.0)
        compute_s = self._rates.prefill_s(num_tokens, 0)
        return wait_s + max(compute_s + self._rates.kv_transfer_latency_s, self._rates.transfer_s(num_tokens))

    def take(self, now_s: float, num_tokens: int) -> float:
        """Queue a prompt; returns when its KV will have arrived."""
        arrives_s = now_s + self.duration_s(now_s, num_tokens)
        compute_s = self._rates.prefill_s(num_tokens, 0)
        starts_s = max(heapq.heappop(self._free_at_s), now_s)
        heapq.heappush(self._free_at_s, starts_s + compute_s)
        self.busy_s += compute_s
        return arrives_s
