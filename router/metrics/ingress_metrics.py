"""Metrics of an ingress replica: latencies as clients see them, each call's outcome, acceptance by tenant and route."""

from __future__ import annotations

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protos.messages import SpeculationStats
from router.api_keys import ApiKeys
from router.routing.request_routing import RouterMetrics

_OTHERS = "other"  # all further tenants
_NOBODY = "none"  # a client without a key
_TTFT_BUCKETS_S = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_E2E_BUCKETS_S = (0.1, 0.25, 0.5, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKEN_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_INTER_TOKEN_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
BROKEN_STATUS = "broken_status"  # of a request's state: the status of the error that ended its stream
_ENDPOINTS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages/count_tokens",
    "/v1/messages",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/health",
    "/live",
    "/ready",
    "/metrics",
)


class IngressMetrics:
    """The ingress's own metric families, in a separate registry; the constructor lists them."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._add_times()
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of sequences.")
        self._generation_tokens = self._counter("generation_tokens", "Tokens generated.")
        self._request_tokens = {
            kind: self._histogram(f"request_{kind}_tokens", f"Tokens of a finished sequence: {kind}.", _TOKEN_BUCKETS)
            for kind in ("prompt", "generation")
        }
        self._finished = self._counter("request_success", "Sequences that ended, by reason.", "finished_reason")
        self._requests = self._counter(
            "requests",
            "Calls by frontend (face: http, grpc), operation and status; a broken stream has its error's status.",
            *("face", "operation", "status"),
        )
        self.body_bytes = self._gauge("http_body_bytes", "Bytes of request bodies being read and checked.")
        self.migrations = self._counter(
            "migrations", "Times a request was resent after its pair was lost, to continue from its committed tokens."
        )
        self._keys_age = self._gauge(
            "api_keys_age_seconds",
            "Seconds since the API key file was last read or found unchanged; grows while it cannot be read.",
        )
        self._wrong_keys = self._gauge("api_keys_wrong_lines", "Invalid lines of the API key file; they admit nobody.")
        self.wanted_pairs = self._gauge(
            "pairs_wanted",
            "Pairs that deploy.yaml requests, the minimum if it gives bounds; equal on all ingress replicas.",
        )
        self.router = RouterMetrics(self._registry)
        self._tenants: dict[str, str] = {}  # labels of the tenants with series of their own
        self._traffic = [
            self._counter(f"spec_decode_traffic_{name}", text, "tenant", "route")
            for name, text in (
                ("passes", "Verification passes of ended sequences, by tenant and route."),
                ("draft_tokens", "Draft tokens verified in these passes."),
                ("accepted_tokens", "Draft tokens accepted in these passes."),
            )
        ]

    def _add_times(self) -> None:
        self._first_token = self._histogram(
            "time_to_first_token_seconds",
            "From the start of a sequence to its first tokens, as sent to the client.",
            _TTFT_BUCKETS_S,
        )
        self._inter_token = self._histogram(
            "inter_token_latency_seconds",
            "Time per token after the first; tokens that arrive together share the wait.",
            _INTER_TOKEN_BUCKETS_S,
        )
        self._e2e = self._histogram(
            "e2e_request_latency_seconds", "From the start of a sequence to its end.", _E2E_BUCKETS_S
        )
        self._decode = self._histogram(
            "request_decode_time_seconds", "From the first tokens of a sequence to its last.", _E2E_BUCKETS_S
        )
        self._token_time = self._histogram(
            "request_time_per_output_token_seconds",
            "Time per token after the first, averaged per sequence.",
            _INTER_TOKEN_BUCKETS_S,
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"outrider_{name}", text, labels, registry=self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"outrider_{name}", text, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"outrider_{name}", text, buckets=buckets, registry=self._registry)

    def watch_keys(self, api_keys: ApiKeys) -> None:
        """Report the state of these keys from now on."""
        self._keys_age.set_function(lambda: api_keys.age_s)
        self._wrong_keys.set_function(lambda: api_keys.num_wrong_lines)

    def count_request(self, frontend: str, operation: str, status: str) -> None:
        """Count one answered call; `operation` must come from a fixed set."""
        self._requests.labels(frontend, operation, status).inc()

    def count_tokens(self, waited_s: float, num_tokens: int, num_prompt_tokens: int | None) -> None:
        """Count tokens that arrived together; with the first of a sequence, also its prompt tokens."""
        self._generation_tokens.inc(num_tokens)
        if num_prompt_tokens is not None:
            self._prompt_tokens.inc(num_prompt_tokens)
            self._first_token.observe(waited_s)
            return
        for _ in range(num_tokens):
            self._inter_token.observe(waited_s / num_tokens)

    def count_end(
        self, reason: str, elapsed_s: float, decode_s: float, num_prompt_tokens: int, num_tokens: int
    ) -> None:
        """Count an ended sequence; `reason` must come from a fixed set."""
        self._finished.labels(reason).inc()
        self._e2e.observe(elapsed_s)
        self._decode.observe(decode_s)
        if num_tokens > 1:
            self._token_time.observe(decode_s / (num_tokens - 1))
        self._request_tokens["prompt"].observe(num_prompt_tokens)
        self._request_tokens["generation"].observe(num_tokens)

    def count_traffic(self, tenant: str, route: str, stats: SpeculationStats) -> None:
        """Count the passes of a sequence that has ended; `route` must come from a fixed set."""
        if stats.num_passes == 0:
            return
        labels = (self._tenant_label(tenant), route)
        counts = (stats.num_passes, stats.num_draft_tokens, stats.num_accepted_tokens)
        for counter, count in zip(self._traffic, counts, strict=True):
            counter.labels(*labels).inc(count)

    def _tenant_label(self, tenant: str) -> str:
        """Return a tenant's own name for the first tenants, and one shared label for later ones."""
        if tenant in self._tenants:
            return self._tenants[tenant]
        if len(self._tenants) >= 32:
            return _OTHERS
        label = tenant or _NOBODY
        # A key without a name is its own tenant, named by its digest.
        self._tenants[tenant] = label if len(label) <= 32 else f"key-{label[:8]}"
        return self._tenants[tenant]

    def text(self) -> str:
        """Return all families as Prometheus text."""
        return generate_latest(self._registry).decode()


class TokenClock:
    """Times the tokens of one sequence."""

    def __init__(self, metrics: IngressMetrics, num_prompt_tokens: int, tenant: str, route: str) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._tenant, self._route = tenant, route
        self._num_tokens = 0
        self._started_s = self._first_s = self._last_s = time.perf_counter()

    def tick(self, num_tokens: int) -> None:
        """Record the arrival of `num_tokens`."""
        if num_tokens == 0:
            return
        now_s = time.perf_counter()
        is_first = self._num_tokens == 0
        self._metrics.count_tokens(now_s - self._last_s, num_tokens, self._num_prompt_tokens if is_first else None)
        self._last_s = now_s
        if is_first:
            self._first_s = now_s
        self._num_tokens += num_tokens

    def end(self, reason: str, speculation: SpeculationStats | None = None) -> None:
        """Record the end of the sequence, with its speculation counts."""
        elapsed_s = time.perf_counter() - self._started_s
        decode_s = self._last_s - self._first_s
        self._metrics.count_end(reason, elapsed_s, decode_s, self._num_prompt_tokens, self._num_tokens)
        if speculation is not None:
            self._metrics.count_traffic(self._tenant, self._route, speculation)


async def count_requests(app: ASGIApp, scope: Scope, receive: Receive, send: Send, metrics: IngressMetrics) -> None:
    """Count an answer when it ends; a stream that an error ended counts with the error's status. ASGI middleware."""
    if scope["type"] != "http":
        await app(scope, receive, send)
        return

    status = None

    async def noting_send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        await send(message)

    try:
        await app(scope, receive, noting_send)
    finally:
        if status is not None:
            status = scope.get("state", {}).get(BROKEN_STATUS, status)
            metrics.count_request("http", _endpoint(scope["path"]), str(status))


def _endpoint(path: str) -> str:
    """Return the endpoint of a path; all unknown paths share one, so that they cannot grow the metrics."""
    return next((endpoint for endpoint in _ENDPOINTS if path == endpoint or path.startswith(endpoint + "/")), "other")
