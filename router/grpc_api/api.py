"""The gRPC frontend: `outrider.v1.Generation` and `grpc.health.v1`, over the same service as the HTTP frontend.

The methods accept the servicer contexts of grpc.aio and of Ray Serve. Serve's lacks `abort` and the call's
deadline; there the client's deadline ends the call by cancelling it. Deployments without Serve's proxy have a server
of their own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from pydantic import BaseModel, ValidationError

from protos import outrider_pb2 as pb2
from protos import outrider_pb2_grpc
from protos.errors import ConfigError, EngineError, NotFoundError, OverloadedError, RequestError, ServingError
from router.api_keys import ApiKeys, Client
from router.client_limits import KEEP_ALIVE_S, REQUEST_TIMEOUT_S
from router.generation.delta import join_deltas
from router.generation.generation import Generation
from router.generation.generation_service import GenerationService
from router.grpc_api.callers import CallContext, authenticate, leave_place
from router.grpc_api.messages import (
    choice_message,
    chunk_message,
    receipt_text,
    request_fields,
    tokenize_fields,
    usage_message,
)
from router.grpc_api.reading_gate import MAX_MESSAGE_BYTES, ReadingGate, end_with
from router.metrics.tracing import call_span
from router.requests.body import as_request_error
from router.requests.chat_request import ChatCompletionRequest
from router.requests.completion_request import CompletionRequest, TokenizeRequest

logger = logging.getLogger(__name__)

SERVICE_NAME = pb2.DESCRIPTOR.services_by_name["Generation"].full_name
_HEALTH_NAMES = ("", SERVICE_NAME)  # everything with a health status; the whole server has an empty name
_HEALTH_PERIOD_S = 5.0
_CALLS = ("Generate", "GenerateStream", "Tokenize", "GetModel", "Check", "List", "Watch")
_OPTIONS = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
MAX_STREAMS = 100  # per connection
_SERVICES = (SERVICE_NAME, "grpc.health.v1.Health", reflection.SERVICE_NAME)

Schema = TypeVar("Schema", bound=BaseModel)
Stay = Callable[[], Awaitable[bool]]


async def _never() -> bool:
    return False


@asynccontextmanager
async def counted(service: GenerationService, operation: str, context: CallContext) -> AsyncIterator[None]:
    """Count a call by its outcome, and trace it; if it fails, end it with the error's status and message."""
    tracer = service.tracer if operation.startswith("Generate") else None
    try:
        with call_span(tracer, SERVICE_NAME, operation, dict(context.invocation_metadata() or ())):
            yield
    except Exception as error:  # the edge of the process
        if not isinstance(error, ServingError):
            logger.exception("%s failed", operation)
            error = EngineError("The server failed while handling this request; it is a server fault.")
        await end_with(error, operation, context, service.metrics.count_request)
    finally:
        leave_place.get()()
    service.metrics.count_request("grpc", operation, grpc.StatusCode.OK.name)


class GrpcApi:
    """The calls, named as in the stubs, with the context argument named as Serve passes it.

    For an endless stream, `open_stay` returns a predicate that is true once the stream has to end.
    """

    def __init__(
        self, service: GenerationService, api_keys: ApiKeys, open_stay: Callable[[], Stay] = lambda: _never
    ) -> None:
        self._service = service
        self._api_keys = api_keys
        self._open_stay = open_stay

    def calls(self) -> dict[str, Callable[..., Any]]:
        """Return the calls by name."""
        return {name: getattr(self, name) for name in _CALLS}

    async def Generate(self, request: pb2.GenerateRequest, grpc_context: CallContext) -> pb2.GenerateResponse:
        """Answer in full."""
        async with counted(self._service, "Generate", grpc_context):
            generation = await self._start(request, grpc_context)
            leave_place.get()()
            choices = [join_deltas(gained) for gained in await generation.choices()]
            steps = generation.steps
            return pb2.GenerateResponse(
                id=generation.id,
                created=generation.created_s,
                model=generation.model_id,
                choices=[choice_message(choice, generation) for choice in choices],
                usage=usage_message(generation.usage),
                x_speculation=None if steps is None else pb2.ApproximateSpeculation(**steps.figures()),
                system_fingerprint=generation.system_fingerprint,
                receipt=receipt_text(generation),
            )

    async def GenerateStream(
        self, request: pb2.GenerateRequest, grpc_context: CallContext
    ) -> AsyncGenerator[pb2.GenerateChunk, None]:
        """Yield the answer as it grows; usage comes with the last message."""
        async with counted(self._service, "GenerateStream", grpc_context):
            generation = await self._start(request, grpc_context)
            leave_place.get()()
            num_open = generation.num_choices
            async with aclosing(generation.deltas()) as deltas:
                async for delta in deltas:
                    chunk = chunk_message(delta, generation)
                    num_open -= delta.finish_reason is not None
                    if num_open == 0:
                        chunk.usage.CopyFrom(usage_message(generation.usage))
                        chunk.receipt = receipt_text(generation)
                    yield chunk

    async def Tokenize(self, request: pb2.TokenizeRequest, grpc_context: CallContext) -> pb2.TokenizeResponse:
        """Return the token ids of a text or a chat."""
        async with counted(self._service, "Tokenize", grpc_context):
            with charged(request, authenticate(self._api_keys, grpc_context)):
                body = await self._service.body_work.run(
                    request.ByteSize(), lambda: validated(tokenize_fields(request), TokenizeRequest)
                )
                tokens = await self._service.tokenize(body)
            card = await self._service.card()
            return pb2.TokenizeResponse(tokens=tokens, count=len(tokens), max_model_len=card.max_model_len)

    async def GetModel(self, request: pb2.GetModelRequest, grpc_context: CallContext) -> pb2.Model:
        """Describe the served model."""
        async with counted(self._service, "GetModel", grpc_context):
            authenticate(self._api_keys, grpc_context)
            self._service.check_model(request.model or None)
            card = await self._service.card()
            return pb2.Model(
                id=self._service.config.model_id,
                created=self._service.created_s,
                owned_by="outrider",
                max_model_len=card.max_model_len,
                vocab_size=card.vocab_size,
            )

    async def Check(
        self, request: health_pb2.HealthCheckRequest, grpc_context: CallContext
    ) -> health_pb2.HealthCheckResponse:
        """Return the health of the server, or of a service by name."""
        async with counted(self._service, "Check", grpc_context):
            if request.service not in _HEALTH_NAMES:
                raise NotFoundError(f"There is no service {request.service!r} here.")
            return health_pb2.HealthCheckResponse(status=await self._health())

    async def List(
        self, request: health_pb2.HealthListRequest, grpc_context: CallContext
    ) -> health_pb2.HealthListResponse:
        """Return the health of the server and of its service by their names."""
        async with counted(self._service, "List", grpc_context):
            health = health_pb2.HealthCheckResponse(status=await self._health())
            return health_pb2.HealthListResponse(statuses=dict.fromkeys(_HEALTH_NAMES, health))

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, grpc_context: CallContext
    ) -> AsyncGenerator[health_pb2.HealthCheckResponse, None]:
        """Yield the health now, and again at every change."""
        last = None
        is_over = self._open_stay()
        while not await is_over():
            is_known = request.service in _HEALTH_NAMES
            status = await self._health() if is_known else health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(_HEALTH_PERIOD_S)

    async def _health(self) -> health_pb2.HealthCheckResponse.ServingStatus:
        try:
            await self._service.fresh_card()
        except OverloadedError:  # busy is healthy
            pass
        except ServingError:
            return health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse.SERVING

    async def _start(self, request: pb2.GenerateRequest, context: CallContext) -> Generation:
        with charged(request, authenticate(self._api_keys, context)):
            read = partial(_body, request, _remaining_s(context))
            body = await self._service.body_work.run(request.ByteSize(), read)
            if isinstance(body, ChatCompletionRequest):
                return await self._service.chat(body)
            return await self._service.complete(body)


@contextmanager
def charged(request: Message, client: Client) -> Iterator[None]:
    """Refuse a request of a client whose rate is used up, and count one that is refused for another reason."""
    client.check_rate()
    try:
        yield
    except RequestError:
        client.charge_refusal(request.ByteSize())
        raise


def _body(request: pb2.GenerateRequest, remaining_s: float | None) -> ChatCompletionRequest | CompletionRequest:
    """Return the validated body of a request with at most `remaining_s` left."""
    fields = request_fields(request)
    fields.setdefault("return_token_ids", True)
    if remaining_s is not None:
        timeout_s = fields.get("timeout_s", remaining_s)
        assert isinstance(timeout_s, float)
        fields["timeout_s"] = min(remaining_s, timeout_s)
    if request.messages:
        return validated(fields, ChatCompletionRequest)
    return validated(fields, CompletionRequest)


def validated(fields: dict[str, object], schema: type[Schema]) -> Schema:
    """Return the fields as a validated body. Raises RequestError for the first invalid field."""
    try:
        return schema.model_validate(fields)
    except ValidationError as error:
        raise as_request_error(error, schema) from None


def _remaining_s(context: CallContext) -> float | None:
    """Return the seconds until the call's deadline, if the context has it."""
    time_remaining = getattr(context, "time_remaining", None)
    return None if time_remaining is None else time_remaining()


def connection_limits(max_connections: int) -> list[tuple[str, int]]:
    """Return the options of a server without a proxy in front; it allows as many streams as HAProxy does."""
    return [
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.server_handshake_timeout_ms", REQUEST_TIMEOUT_S * 1000),
        ("grpc.max_connection_idle_ms", KEEP_ALIVE_S * 1000),
    ]


async def start_grpc_server(
    api: GrpcApi,
    gate: ReadingGate,
    address: str,
    add_more: Callable[[grpc.aio.Server], str] | None = None,
    *,
    limits: Sequence[tuple[str, int]] = (),
    tls: tuple[str | None, str | None] = (None, None),
) -> grpc.aio.Server:
    """Return a server that listens on `host:port` and reads through `gate`.

    `add_more` adds another service to it and returns its name. `tls` names the files with the certificate and its key,
    and the authority that signs clients' certificates.

    Raises:
        ConfigError: the address is not available.
    """
    # More are refused as RESOURCE_EXHAUSTED.
    server = grpc.aio.server(interceptors=[gate], options=[*_OPTIONS, *limits], maximum_concurrent_rpcs=4096)
    outrider_pb2_grpc.add_GenerationServicer_to_server(api, server)  # type: ignore[no-untyped-call]
    health_pb2_grpc.add_HealthServicer_to_server(api, server)
    names = _SERVICES if add_more is None else (*_SERVICES, add_more(server))
    reflection.enable_server_reflection(names, server)
    try:
        _listen(server, address, *tls)
    except RuntimeError as error:
        raise ConfigError(f"gRPC cannot listen at {address}: {error}; choose another --grpc-port, or 0") from None
    await server.start()
    return server


def _listen(server: grpc.aio.Server, address: str, certificate: str | None, client_ca: str | None) -> None:
    if certificate is None:
        server.add_insecure_port(address)
        return
    pem = Path(certificate).read_bytes()
    authority = None if client_ca is None else Path(client_ca).read_bytes()
    credentials = grpc.ssl_server_credentials(
        [(pem, pem)], root_certificates=authority, require_client_auth=authority is not None
    )
    server.add_secure_port(address, credentials)
