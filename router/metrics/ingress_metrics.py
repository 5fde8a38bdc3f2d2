"""Metrics that an ingress replica measures: latencies as a client sees them, and the outcome of every call."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from router.routing.router_metrics import RouterMetrics

_TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_INTER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)


class IngressMetrics:
    """The ingress's own families, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._first_token = Histogram(
            "outrider_time_to_first_token_seconds",
            "From the start of a sequence to its first tokens, as sent to the client.",
            buckets=_TTFT_BUCKETS_S,
            registry=self._registry,
        )
        self._inter_token = Histogram(
            "outrider_inter_token_latency_seconds",
            "Time per token after the first; tokens that arrive together share the wait for them.",
            buckets=_INTER_TOKEN_BUCKETS_S,
            registry=self._registry,
        )
        self._requests = Counter(
            "outrider_requests",
            "Calls by frontend (face: http, grpc), operation and status.",
            ("face", "operation", "status"),
            registry=self._registry,
        )
        self._migrations = Counter(
            "outrider_migrations",
            "Times a request was sent again, to go on from its committed tokens, as its pair was lost.",
            registry=self._registry,
        )
        self.router = RouterMetrics(self._registry)

    def count_request(self, frontend: str, operation: str, status: str) -> None:
        """Count one answered call; `operation` must come from a fixed set."""
        self._requests.labels(frontend, operation, status).inc()

    def count_migration(self) -> None:
        """Count one attempt to go on with a request whose pair was lost."""
        self._migrations.inc()

    def token_clock(self) -> TokenClock:
        """A clock that starts now, for one sequence."""
        return TokenClock(self._first_token, self._inter_token)

    def text(self) -> str:
        """All families in Prometheus text."""
        return generate_latest(self._registry).decode()


class TokenClock:
    """Times the tokens of one sequence."""

    def __init__(self, first_token: Histogram, inter_token: Histogram) -> None:
        self._first_token = first_token
        self._inter_token = inter_token
        self._last_s = time.perf_counter()
        self._has_started = False

    def tick(self, num_tokens: int) -> None:
        """`num_tokens` have just arrived."""
        if num_tokens == 0:
            return
        now_s = time.perf_counter()
        elapsed_s = now_s - self._last_s
        self._last_s = now_s
        if not self._has_started:
            self._has_started = True
            self._first_token.observe(elapsed_s)
            return
        for _ in range(num_tokens):
            self._inter_token.observe(elapsed_s / num_tokens)
