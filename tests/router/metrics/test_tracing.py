"""Traces: one per request, below the client's, with the tokens and the acceptance; none without an endpoint."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, HTTPServer

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import Tracer

from cluster.local.serve_environment import free_port
from protos import outrider_pb2, outrider_pb2_grpc
from protos.errors import RequestError
from protos.messages import FirstTokenTimes, GenerateRequest, TokenChunk
from router.api_keys import ApiKeys
from router.generation.generation_service import GenerationService
from router.grpc_api.api import GrpcApi, start_grpc_server
from router.grpc_api.reading_gate import ReadingGate
from router.metrics.tracing import tracer_from_environment
from router.openai.api import build_app
from tests.router.fixtures.fake_backend import FakeBackend

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01", "x-request-id": "mine"}


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def tracer_of(exporter: InMemorySpanExporter) -> Tracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("test")


@pytest.fixture
def client(service: GenerationService, backend: FakeBackend, exporter: InMemorySpanExporter) -> httpx.AsyncClient:
    return client_of(service, backend, exporter)


def client_of(service: GenerationService, backend: FakeBackend, exporter: InMemorySpanExporter) -> httpx.AsyncClient:
    traced = GenerationService(backend, service.files, service.config, service.metrics, tracer_of(exporter))
    transport = httpx.ASGITransport(app=build_app(traced, ApiKeys()))
    return httpx.AsyncClient(transport=transport, base_url="http://test", headers=PARENT)


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_is_one_trace_below_its_clients(
    client: httpx.AsyncClient, exporter: InMemorySpanExporter, stream: bool
):
    body = {"prompt": "ab", "max_tokens": 6, "stream": stream}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    spans = by_name(exporter)
    assert set(spans) == {"POST /v1/completions", "text_completion fake", "first token", "stream"}
    assert {f"{span.context.trace_id:032x}" for span in spans.values() if span.context} == {TRACE_ID}
    server, sequence = spans["POST /v1/completions"], spans["text_completion fake"]
    assert server.attributes is not None
    assert server.attributes["outrider.request_id"] == "mine"
    assert server.parent is not None
    assert f"{server.parent.span_id:016x}" == "b7ad6b7169203331"
    assert server.context is not None
    assert sequence.parent is not None
    assert sequence.parent.span_id == server.context.span_id
    found = sequence.attributes
    assert found is not None
    assert (found["gen_ai.usage.input_tokens"], found["gen_ai.usage.output_tokens"]) == (2, 6)
    assert found["gen_ai.response.finish_reasons"] == ("length",)
    assert [event.name for event in sequence.events] == ["first token"]


@dataclass
class TimedBackend(FakeBackend):
    """Tells the phases before the first tokens of requests that are traced, as a pair does."""

    times: FirstTokenTimes = field(default_factory=lambda: FirstTokenTimes(0.0, 0.0, 0.0))

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Sequence[TokenChunk], None]:
        await asyncio.sleep(0.02)
        is_first = request.is_traced
        async for batch in super().generate(request):
            yield [replace(batch[0], times=self.times), *batch[1:]] if is_first else batch
            is_first = False


def milliseconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e6


async def test_the_time_until_the_first_token_has_a_span_per_phase(
    service: GenerationService, exporter: InMemorySpanExporter
):
    backend = TimedBackend(times=FirstTokenTimes(queued_s=0.002, transfer_s=0.004, prefill_s=0.006, routed_s=0.001))
    async with client_of(service, backend, exporter) as client:
        await client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 6})
    spans = by_name(exporter)
    phases = ("router", "queue", "transfer", "prefill")
    assert [round(milliseconds(spans[name])) for name in phases] == [1, 2, 4, 6]
    starts = [spans[name].start_time or 0 for name in phases]
    assert starts == sorted(starts)
    assert spans["router"].start_time == spans["first token"].start_time
    assert spans["prefill"].end_time == spans["first token"].end_time == spans["stream"].start_time
    sequence = spans["text_completion fake"].context
    assert sequence is not None
    assert {span.parent.span_id for name, span in spans.items() if name in phases and span.parent} == {sequence.span_id}


async def test_phases_that_took_no_time_have_no_span(service: GenerationService, exporter: InMemorySpanExporter):
    async with client_of(service, TimedBackend(), exporter) as client:
        await client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 6})
    assert not {"router", "queue", "transfer", "prefill"} & set(by_name(exporter))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_grpc_call_is_one_trace_too(service: GenerationService, exporter: InMemorySpanExporter, stream: bool):
    traced = GenerationService(FakeBackend(), service.files, service.config, service.metrics, tracer_of(exporter))
    address = f"127.0.0.1:{free_port()}"
    server = await start_grpc_server(
        GrpcApi(traced, ApiKeys()), ReadingGate(ApiKeys(), traced.metrics.count_request), address
    )
    request = outrider_pb2.GenerateRequest(prompt="ab", max_tokens=6)
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = outrider_pb2_grpc.GenerationStub(channel)
            if stream:
                async for _ in stub.GenerateStream(request, metadata=tuple(PARENT.items())):
                    pass
            else:
                await stub.Generate(request, metadata=tuple(PARENT.items()))
    finally:
        await server.stop(None)
    spans = by_name(exporter)
    call = spans[f"outrider.v1.Generation/{'GenerateStream' if stream else 'Generate'}"]
    assert call.parent is not None
    assert f"{call.parent.span_id:016x}" == "b7ad6b7169203331"
    assert call.context is not None
    sequence = spans["text_completion fake"]
    assert sequence.parent is not None
    assert sequence.parent.span_id == call.context.span_id


async def test_each_choice_has_a_span(client: httpx.AsyncClient, exporter: InMemorySpanExporter):
    await client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 2, "n": 3})
    assert [span.name for span in exporter.get_finished_spans()].count("text_completion fake") == 3


async def test_a_failure_is_told(client: httpx.AsyncClient, backend: FakeBackend, exporter: InMemorySpanExporter):
    backend.failures = [RequestError("no")]
    await client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 2})
    span = by_name(exporter)["text_completion fake"]
    assert not span.status.is_ok
    assert span.attributes is not None
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort",)


def test_nothing_is_traced_without_an_endpoint(monkeypatch: pytest.MonkeyPatch):
    for name in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert tracer_from_environment() is None


def test_spans_reach_the_collector_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    received: list[ExportTraceServiceRequest] = []
    has_come = threading.Event()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()
            has_come.set()

        def log_message(self, format: str, *args: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    tracer = tracer_from_environment()
    assert tracer is not None
    tracer.start_span("one").end()
    assert has_come.wait(30)
    server.shutdown()
    assert received[0].resource_spans[0].scope_spans[0].spans[0].name == "one"
