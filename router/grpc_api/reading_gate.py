"""Reads gRPC messages: checks the caller first, and bounds memory by the number of messages read at once.

A server reads a call's whole message before any method is called: sixty messages of 15 MiB grew an ingress by 1.2 GiB.
Stream handlers read their messages themselves, so the gate turns every handler into one and reads for it.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from inspect import isawaitable
from typing import Any, NoReturn, Self

import grpc
from google.protobuf.message import DecodeError

from protos.errors import DeadlineExceededError, OverloadedError, RequestError, RequestTooLargeError, ServingError
from router.api_keys import ApiKeys
from router.client_limits import MAX_ENDLESS_CALLS
from router.grpc_api.callers import (
    CallContext,
    ReadingLimits,
    ReadingPlace,
    ReadingPlaces,
    address,
    authenticate,
    check_peer,
    leave_place,
)

MAX_MESSAGE_BYTES = 8 << 20  # as for an HTTP body; Serve's proxy gets it from `cluster.local.serve_environment`
_LAST_TRIM_S = 2.0  # after the last large one, which has been checked and freed by then
_MAX_ENDLESS = 1024  # concurrent calls without a key that end only when the client wants

# The calls that need no key, with the size limit of their messages in bytes; all others need a key.
OPEN_METHODS: Mapping[str, int] = {
    "/grpc.health.v1.Health/Check": 64,
    "/grpc.health.v1.Health/List": 64,
    "/grpc.health.v1.Health/Watch": 64,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": 4096,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": 4096,
    "/ray.serve.RayServeAPIService/Healthz": 64,  # Serve's own two: HAProxy calls them
    "/ray.serve.RayServeAPIService/ListApplications": 64,
}

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]
CountRequest = Callable[[str, str, str], object]


# For calls without a key: their messages are so small that they arrive with the call.
OPEN_LIMITS = ReadingLimits(grace_s=0.25, wait_s=2.0, read_s=5.0)


class ReadingGate(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio has no types
    """Reads a call's message once its caller is known and there is a place; for one event loop.

    Args:
        api_keys: None if the call is forwarded to a process that checks the key.
        count_request: called for refused calls with the frontend, the method's name and the status.
        has_proxy: calls come through a proxy, which names its client's address.
    """

    def __init__(
        self,
        api_keys: ApiKeys | None,
        count_request: CountRequest,
        *,
        has_proxy: bool = False,
        limits: ReadingLimits = ReadingLimits(),
        open_limits: ReadingLimits = OPEN_LIMITS,
    ) -> None:
        self._api_keys = api_keys
        self.count_request = count_request
        self._has_proxy = has_proxy
        self.limits = limits
        self.open_limits = open_limits
        self._is_trimming = False
        self._last_trim: asyncio.TimerHandle | None = None
        self.places = ReadingPlaces(limits)
        self.open_places = ReadingPlaces(open_limits)
        self._endless: Counter[str] = Counter()

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Any:
        """Return a handler that checks the call before reading anything, and then reads its message."""
        handler = await continuation(details)
        return None if handler is None else self._gated(details.method, handler)

    def _gated(self, method: str, handler: Any) -> Any:
        async def answer(_: Any, context: grpc.aio.ServicerContext) -> Any:
            async with _GatedCall(self, method, handler, context) as call:
                return await handler.unary_unary(await call.request(), context)

        async def stream(_: Any, context: grpc.aio.ServicerContext) -> AsyncGenerator[Any, None]:
            async with _GatedCall(self, method, handler, context) as call:
                if handler.request_streaming:
                    answers = handler.stream_stream(call.requests(), context)
                else:
                    answers = handler.unary_stream(await call.request(), context)
                if isawaitable(answers):  # it writes the answers itself
                    await answers
                    return
                async with aclosing(answers):
                    async for each in answers:
                        yield each

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(stream, None, handler.response_serializer)
        assert not handler.request_streaming, "no service has a stream of messages with one answer"
        return grpc.stream_unary_rpc_method_handler(answer, None, handler.response_serializer)

    def caller_of(self, method: str, context: grpc.aio.ServicerContext) -> str:
        """Return the caller whose places a call uses: its tenant, or its address without a key.

        Raises:
            AuthenticationError: the call needs a key, and has no valid one.
            PermissionDeniedError: it bypasses the proxy.
        """
        check_peer(context)
        if method not in OPEN_METHODS and self._api_keys is not None:
            tenant = authenticate(self._api_keys, context).tenant
            if tenant:
                return f"tenant {tenant}"
        return address(context, has_proxy=self._has_proxy)

    def enter_endless(self, caller: str) -> None:
        """Count an endless call without a key. Raises OverloadedError above the limit."""
        if self._endless[caller] >= MAX_ENDLESS_CALLS or self._endless.total() >= _MAX_ENDLESS:
            raise OverloadedError(
                f"At most {MAX_ENDLESS_CALLS} such calls per address may be open at once, and {_MAX_ENDLESS} in "
                "total; end one first."
            )
        self._endless[caller] += 1

    def leave_endless(self, caller: str) -> None:
        """Uncount an endless call."""
        self._endless -= Counter([caller])  # and drop callers without any

    def note_read(self, num_bytes: int) -> None:
        """Schedule the return of a large message's memory: the C library would keep hundreds of MiB of fragments."""
        if num_bytes <= 1 << 20:
            return
        loop = asyncio.get_running_loop()
        if not self._is_trimming:
            self._is_trimming = True
            loop.call_later(0.3, loop.run_in_executor, None, self._trim)  # covers all that arrive until then
        if self._last_trim is not None:
            self._last_trim.cancel()
        self._last_trim = loop.call_later(_LAST_TRIM_S, loop.run_in_executor, None, self._trim)

    def _trim(self) -> None:
        self._is_trimming = False
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
        if trim is not None:
            trim(0)


async def end_with(
    error: ServingError, operation: str, context: grpc.aio.ServicerContext | CallContext, count_request: CountRequest
) -> NoReturn:
    """End a call with the error's status and message, and count it."""
    code = grpc.StatusCode[error.grpc_code]
    count_request("grpc", operation, code.name)
    if error.retry_after_s is not None:
        context.set_trailing_metadata((("retry-after", str(error.retry_after_s)),))
    if (abort := getattr(context, "abort", None)) is not None:  # Serve's context has none
        await abort(code, error.message)
    context.set_code(code)
    context.set_details(error.message)
    raise error


class _GatedCall:
    """One call that passes the gate; it releases its place in every case."""

    def __init__(self, gate: ReadingGate, method: str, handler: Any, context: grpc.aio.ServicerContext) -> None:
        self._gate = gate
        self._method = method
        self._handler = handler
        self._context = context
        self._is_open = method in OPEN_METHODS
        self._limits = gate.open_limits if self._is_open else gate.limits
        self._place: ReadingPlace | None = None
        self._endless_caller: str | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leave_place()
        if self._endless_caller is not None:
            self._gate.leave_endless(self._endless_caller)

    async def request(self) -> Any:
        """Return the call's one message, or end the call."""
        try:
            message = await self._next(self._enter())
            if message is None:
                raise RequestError("The call ended without sending its message.")
        except ServingError as error:
            await end_with(error, self._method.rpartition("/")[2], self._context, self._gate.count_request)
        assert self._place is not None
        if self._is_open:
            self._leave_place()
        loop, leave = asyncio.get_running_loop(), self._place.leave
        loop.call_later(self._limits.read_s, leave)
        leave_place.set(lambda: loop.call_soon_threadsafe(leave))
        return message

    async def requests(self) -> AsyncIterator[Any]:
        """Yield the messages of the call as they arrive, or end the call."""
        try:
            caller = self._enter()
            while (message := await self._next(caller)) is not None:
                self._leave_place()
                yield message
        except ServingError as error:
            await end_with(error, self._method.rpartition("/")[2], self._context, self._gate.count_request)

    def _enter(self) -> str:
        caller = self._gate.caller_of(self._method, self._context)
        if self._is_open and self._handler.response_streaming:
            self._gate.enter_endless(caller)
            self._endless_caller = caller
        return caller

    async def _next(self, caller: str) -> Any:
        """Return the next message while holding its place; None at the end."""
        places = self._gate.open_places if self._is_open else self._gate.places
        self._place = await places.take(caller)
        # Never cancelled: the library writes the message into the task's memory.
        reader = asyncio.ensure_future(self._context.read())
        reader.add_done_callback(_pass_over)
        await asyncio.wait({reader, self._place.lost}, timeout=self._limits.read_s, return_when=asyncio.FIRST_COMPLETED)
        if not reader.done():
            raise self._late()
        self._place.is_read = True
        return self._checked(reader.result())

    def _late(self) -> ServingError:
        assert self._place is not None
        if self._place.lost.done():
            return OverloadedError(
                f"The message has not come within {self._limits.grace_s:g} s, and other calls waited; send it again.",
                retry_after_s=self._limits.wait_s,
            )
        return DeadlineExceededError(f"The message has not come within {self._limits.read_s:g} s; send it at once.")

    def _checked(self, message: Any) -> Any:
        if message is grpc.aio.EOF:
            return None
        limit = OPEN_METHODS.get(self._method, MAX_MESSAGE_BYTES)
        if len(message) > limit:
            raise RequestTooLargeError(f"The message has {len(message)} bytes; this call reads at most {limit}.")
        self._gate.note_read(len(message))
        if self._handler.request_deserializer is None:
            return message
        try:
            return self._handler.request_deserializer(message)
        except DecodeError:
            raise RequestError(f"The {len(message)} bytes are not a valid message of this call.") from None

    def _leave_place(self) -> None:
        if self._place is not None:
            self._place.leave()


def _pass_over(reader: asyncio.Future[Any]) -> None:
    """Retrieve a reader's exception, which nobody else does if its call ended earlier."""
    if not reader.cancelled():
        reader.exception()
