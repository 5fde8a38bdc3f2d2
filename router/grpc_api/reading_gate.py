"""The reading of gRPC messages: the key is checked first, and their bytes are bounded by the number read at once.

A server reads a call's message whole before any method hears of the call: sixty of 15 MiB made an ingress 1.2 GiB
larger. An interceptor is asked before that.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from protos.errors import OverloadedError, ServingError
from router.api_keys import ANYONE, ApiKeys
from router.grpc_api.api import SERVICE_NAME
from router.grpc_api.callers import leave_place
from router.metrics.ingress_metrics import IngressMetrics

MAX_MESSAGE_BYTES = 8 << 20  # as of a body over HTTP; Serve's proxy has it by `cluster.local.serve_environment`
_MAX_READ = 16  # messages at once, of all clients
_MAX_READ_OF_TENANT = 8  # the others' places are kept from one whose messages come slowly
_WAIT_S = 5.0  # for a place
_READ_S = 15.0  # until the place of a message is another's, even if it is not read and checked by then
_LARGE_BYTES = 1 << 20  # of a message, whose memory is given back
_TRIM_S = 0.3  # after a large one, for all that have come by then
_LAST_TRIM_S = 2.0  # after the last large one, which is checked and gone by then

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[Any]]


class ReadingGate(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio has no types
    """Lets a call's message be read once its key is known and there is a place; for one event loop."""

    def __init__(self, api_keys: ApiKeys, metrics: IngressMetrics) -> None:
        self._api_keys = api_keys
        self._metrics = metrics
        self._is_trimming = False
        self._last_trim: asyncio.TimerHandle | None = None
        self._places = asyncio.Semaphore(_MAX_READ)
        self._places_of_tenant: defaultdict[str, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(_MAX_READ_OF_TENANT)
        )

    async def intercept_service(self, continuation: Continuation, details: grpc.HandlerCallDetails) -> Any:
        """Return the call's handler, or one that refuses the call and reads nothing of it."""
        handler = await continuation(details)
        if handler is None or handler.request_streaming:  # reflection: a method reads its messages itself
            return handler
        try:
            leave = await self._enter(self._tenant(details))
        except ServingError as error:
            return self._refusal(details.method, error)
        loop = asyncio.get_running_loop()
        leave_place.set(lambda: loop.call_soon_threadsafe(leave))
        deserialize, is_ours = handler.request_deserializer, _is_ours(details)

        def read(message: bytes) -> Any:
            if len(message) > _LARGE_BYTES:
                self._trim_later(loop)
            if not is_ours:  # its method knows nothing of places
                leave()
            return message if deserialize is None else deserialize(message)

        return handler._replace(request_deserializer=read)

    def _tenant(self, details: grpc.HandlerCallDetails) -> str:
        """Return the tenant of a call. Raises AuthenticationError for one that needs a key and has none."""
        if not _is_ours(details):
            return ANYONE.tenant
        metadata = dict(details.invocation_metadata or ())
        return self._api_keys.check(metadata.get("authorization"), metadata.get("x-api-key")).tenant

    async def _enter(self, tenant: str) -> Callable[[], None]:
        """Take a place, and return what gives it back: once, after `_READ_S` by itself."""
        places = (self._places_of_tenant[tenant], self._places)
        taken = []
        try:
            async with asyncio.timeout(_WAIT_S):
                for each in places:
                    await each.acquire()
                    taken.append(each)
        except BaseException as error:
            for each in taken:
                each.release()
            if isinstance(error, TimeoutError):
                raise OverloadedError(
                    f"{_MAX_READ_OF_TENANT} messages of this client, or {_MAX_READ} of all, are being read; send this "
                    "one again later.",
                    retry_after_s=_WAIT_S,
                ) from None
            raise

        def leave() -> None:
            timer.cancel()
            while taken:
                taken.pop().release()

        timer = asyncio.get_running_loop().call_later(_READ_S, leave)
        return leave

    def _trim_later(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._is_trimming:
            self._is_trimming = True
            loop.call_later(_TRIM_S, loop.run_in_executor, None, self._trim)
        if self._last_trim is not None:
            self._last_trim.cancel()
        self._last_trim = loop.call_later(_LAST_TRIM_S, loop.run_in_executor, None, self._trim)

    def _trim(self) -> None:
        """Give memory back: messages come in small pieces, of which the C library keeps hundreds of MiB."""
        self._is_trimming = False
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
        if trim is not None:
            trim(0)

    def _refusal(self, method: str, error: ServingError) -> Any:
        """Return a handler that ends the call with the error; a handler of streams reads only what it asks for."""
        code = grpc.StatusCode[error.grpc_code]
        self._metrics.count_request("grpc", method.rpartition("/")[2], code.name)
        metadata = () if error.retry_after_s is None else (("retry-after", str(error.retry_after_s)),)

        async def refuse(_: Any, context: grpc.aio.ServicerContext) -> None:
            await context.abort(code, error.message, metadata)

        return grpc.stream_stream_rpc_method_handler(refuse)


def _is_ours(details: grpc.HandlerCallDetails) -> bool:
    return bool(details.method.startswith(f"/{SERVICE_NAME}/"))
