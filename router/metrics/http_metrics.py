"""Counts of HTTP answers by endpoint and status."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.metrics.ingress_metrics import IngressMetrics

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


class CountRequests:
    """ASGI middleware; counts an answer when it ends, a stream that an error ended by the status of the error."""

    def __init__(self, app: ASGIApp, metrics: IngressMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        status = None

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        finally:
            if status is not None:
                status = scope.get("state", {}).get(BROKEN_STATUS, status)
                self._metrics.count_request("http", _endpoint(scope["path"]), str(status))


def _endpoint(path: str) -> str:
    """Return the endpoint of a path; all unknown paths share one, so that they cannot grow the metrics."""
    return next((endpoint for endpoint in _ENDPOINTS if path == endpoint or path.startswith(endpoint + "/")), "other")
