"""OpenTelemetry traces: a span per call, one per sequence below it, and one per phase before the first token.

Off unless the standard environment variables name an OTLP endpoint; otherwise OpenTelemetry is not even imported.
Attributes follow its semantic conventions for generative AI (`gen_ai.*`); acceptance uses `outrider.*`. The ingress
writes all spans. A pair measures the phases of traced requests and sends them with the first tokens, so its processes
need no exporter and not the ingress's clock.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from protos.client_text import for_log
from protos.errors import ConfigError
from protos.messages import FirstTokenTimes, GenerateRequest, TokenChunk
from router.backend import OpenStream

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

logger = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")


def tracer_from_environment() -> Tracer | None:
    """Return a tracer that sends to the environment's OTLP endpoint (HTTP); None without an endpoint.

    Raises:
        ConfigError: an endpoint is set, but the exporter is not installed.
    """
    endpoint = next((os.environ[name] for name in _ENDPOINTS if os.environ.get(name)), None)
    if endpoint is None or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"traces are configured ({endpoint}), but {error.name} is missing; pip install 'outrider[otel]', or unset "
            f"{' and '.join(_ENDPOINTS)}"
        ) from error
    name = os.environ.get("OTEL_SERVICE_NAME", "outrider")
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    logger.info("traces go to %s as %s", endpoint, name)
    return provider.get_tracer("outrider")


async def trace_requests(app: ASGIApp, scope: Scope, receive: Receive, send: Send, tracer: Tracer) -> None:
    """Open a server span around each call of the API, below the client's `traceparent`. ASGI middleware."""
    if scope["type"] != "http" or not scope["path"].startswith("/v1/"):
        await app(scope, receive, send)
        return
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
    attributes = {
        "http.request.method": scope["method"],
        "outrider.request_id": for_log(headers.get("x-request-id", "")),
    }
    # Without model names there are few span names.
    path = "/v1/models" if scope["path"].startswith("/v1/models") else scope["path"]
    with tracer.start_as_current_span(
        for_log(f"{scope['method']} {path}"),
        context=TraceContextTextMapPropagator().extract(headers),
        kind=SpanKind.SERVER,
        attributes=attributes,
        record_exception=False,
    ) as span:

        async def send_and_note(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set_attribute("http.response.status_code", message["status"])
            await send(message)

        await app(scope, receive, send_and_note)


@contextmanager
def call_span(tracer: Tracer | None, service: str, method: str, metadata: Mapping[str, str]) -> Iterator[None]:
    """Open a server span around a gRPC call, below the trace of the client's `traceparent`; no-op without a tracer.

    The span stays current in its task and is never detached: a stream's generator may end in another task, and the
    call's task ends with the call.
    """
    if tracer is None:
        yield
        return
    from opentelemetry.context import attach
    from opentelemetry.trace import SpanKind, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    span = tracer.start_span(
        f"{service}/{method}",
        context=TraceContextTextMapPropagator().extract(metadata),
        kind=SpanKind.SERVER,
        attributes={"rpc.system": "grpc", "rpc.service": service, "rpc.method": method},
    )
    attach(set_span_in_context(span))
    try:
        yield
    except Exception as error:
        note_error(span, error)
        raise
    finally:
        span.end()


def note_error(span: Span, error: Exception) -> None:
    """Mark a span as failed, with the start of the error's message, which may contain client text."""
    from opentelemetry.trace import StatusCode

    message = for_log(error)
    span.add_event("exception", {"exception.type": type(error).__name__, "exception.message": message})
    span.set_status(StatusCode.ERROR, message)


def traced(open_stream: OpenStream, tracer: Tracer, model_id: str) -> OpenStream:
    """Return `open_stream` with a span for each sequence."""

    async def open_traced(request: GenerateRequest) -> AsyncGenerator[Sequence[TokenChunk], None]:
        operation = "chat" if request.request_id.startswith("chatcmpl") else "text_completion"
        # Not the current span: a generator may be closed in another task.
        span = tracer.start_span(
            f"{operation} {model_id}", attributes=_request_attributes(request, operation, model_id)
        )
        record = _SequenceRecord(tracer, span)
        try:
            async with aclosing(open_stream(replace(request, is_traced=True))) as batches:
                async for batch in batches:
                    record.add(batch)
                    yield batch
        except Exception as error:
            note_error(span, error)
            raise
        finally:
            record.end()

    return open_traced


class _SequenceRecord:
    """The numbers of one sequence, and its phases: up to the first token, and after it."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._start_ns = time.time_ns()
        self._first_ns: int | None = None
        self._times: FirstTokenTimes | None = None
        self._num_tokens = 0
        self._attributes: dict[str, str | int | float | Sequence[str]] = {}

    def add(self, batch: Sequence[TokenChunk]) -> None:
        """Record a batch."""
        for chunk in batch:
            if chunk.token_ids and self._first_ns is None:
                self._first_ns = time.time_ns()
                self._attributes["gen_ai.usage.cache_read.input_tokens"] = chunk.num_cached_tokens
            self._times = self._times or chunk.times
            self._num_tokens += len(chunk.token_ids)
            if chunk.finish_reason is not None:
                self._attributes["gen_ai.response.finish_reasons"] = [str(chunk.finish_reason)]
            if chunk.speculation is not None:
                self._attributes |= _acceptance(
                    chunk.speculation.num_draft_tokens, chunk.speculation.num_accepted_tokens
                )

    def end(self) -> None:
        """End the span, and write the spans of its phases; without a finish reason the sequence was aborted."""
        from opentelemetry.trace import set_span_in_context

        end_ns = time.time_ns()
        context = set_span_in_context(self._span)
        phases = [("first token", self._start_ns, self._first_ns or end_ns)]
        if self._first_ns is not None:
            phases += _phases(self._start_ns, self._first_ns, self._times)
            self._span.add_event("first token", timestamp=self._first_ns)
            phases.append(("stream", self._first_ns, end_ns))
        for name, start_ns, stop_ns in phases:
            self._tracer.start_span(name, context=context, start_time=start_ns).end(stop_ns)
        self._attributes.setdefault("gen_ai.response.finish_reasons", ["abort"])
        self._span.set_attributes({**self._attributes, "gen_ai.usage.output_tokens": self._num_tokens})
        self._span.end(end_ns)


def _phases(start_ns: int, first_ns: int, times: FirstTokenTimes | None) -> list[tuple[str, int, int]]:
    """Return the phases that took time, in order, as (name, start, end) in nanoseconds.

    The choice of a pair comes first. The others end with the first token; the rest in between is transport.
    """
    if times is None:
        return []
    found = [] if times.routed_s is None else [("router", start_ns, min(first_ns, start_ns + _ns(times.routed_s)))]
    inside = (("queue", times.queued_s), ("transfer", times.transfer_s), ("prefill", times.prefill_s))
    begin_ns = max(start_ns, first_ns - _ns(sum(seconds for _, seconds in inside)))
    bounds_ns = [begin_ns]
    for _, seconds in inside:
        bounds_ns.append(min(first_ns, bounds_ns[-1] + _ns(seconds)))
    for (name, seconds), (begin, end) in zip(inside, pairwise(bounds_ns), strict=True):
        if seconds > 0:
            found.append((name, begin, end))
    return found


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _request_attributes(request: GenerateRequest, operation: str, model_id: str) -> Mapping[str, str | int | float]:
    return {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "outrider",
        "gen_ai.request.model": model_id,
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.max_tokens": request.sampling.max_tokens,
        "gen_ai.request.temperature": request.sampling.temperature,
        "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
    }


def _acceptance(num_drafted: int, num_accepted: int) -> dict[str, int | float]:
    acceptance = {"outrider.acceptance": num_accepted / num_drafted} if num_drafted else {}
    return {"outrider.draft_tokens": num_drafted, "outrider.accepted_tokens": num_accepted, **acceptance}
