"""The validated body of an HTTP request: content type, encoding, size, memory shared with others, JSON, schema.

Clients send more fields than any one server knows. Those that no schema has are left out of the body, and named in the
answer's header `X-Ignored-Fields`; `strict_fields` refuses them.
"""

from __future__ import annotations

import asyncio
import codecs
import json
import logging
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from protos.client_text import check_parts, for_log
from protos.errors import OverloadedError, RequestError, RequestTimeoutError, RequestTooLargeError
from router.api_keys import current_client
from router.client_limits import BODY_GRACE_S, MIN_BODY_BYTES_PER_S, REQUEST_TIMEOUT_S
from router.config import IngressLimits
from router.metrics.ingress_metrics import IngressMetrics
from router.requests.body import BodyWork, as_request_error
from router.requests.foreign_fields import known_fields

logger = logging.getLogger(__name__)

Schema = TypeVar("Schema", bound=BaseModel)
Part = TypeVar("Part")
Result = TypeVar("Result")

IGNORED_FIELDS = "ignored_fields"  # of a request's state
# A wrong name in these is always refused: they constrain the answer.
_OURS = ("speculation", "structured_outputs", "response_format")
BODIES_IN_FLIGHT = 16  # of the greatest length, read and checked at one time
_CHARSETS = ("utf-8", "utf8", "us-ascii")
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


class BodyReader:
    """Reads bodies; all bodies being read and checked together hold at most `BODIES_IN_FLIGHT` of the longest.

    Bytes count as they arrive: a client that announces a long body and sends it slowly takes no room from others.
    """

    def __init__(self, limits: IngressLimits, metrics: IngressMetrics, work: BodyWork, *, is_strict: bool) -> None:
        self._limits = limits
        self._metrics = metrics
        self._work = work
        self._is_strict = is_strict
        self._num_held = 0

    async def read(self, request: Request, schema: type[Schema], *, is_strict: bool = False) -> Schema:
        """Return the request's body as `schema`; the request's state gets the names of its ignored fields.

        Raises:
            RequestError: it is not declared as JSON, is not JSON, or breaks the schema.
            RequestTimeoutError: it comes too slowly.
            RequestTooLargeError: it is longer than `max_body_bytes`, as sent or expanded; reading stops there.
            OverloadedError: the other bodies being read leave no room for it.
            RateLimitError: the tenant's rate is used up.
        """
        _check_type(request.headers.get("content-type", ""))
        current_client.get().check_rate()
        body = bytearray()
        try:
            await self._fill(body, request)
            request.state.num_body_bytes = len(body)
            self._hold(-_drop_mark(body))
            parse = partial(_parsed, body, request, schema, is_strict=is_strict or self._is_strict)
            return await self.work(request, parse)
        finally:
            self._hold(-len(body))

    async def work(self, request: Request, work: Callable[[], Result]) -> Result:
        """Return the result of work on a request's body, which has been read."""
        return await self._work.run(request.state.num_body_bytes, work)

    async def _fill(self, body: bytearray, request: Request) -> None:
        """Add the body of `request`, expanded if it is compressed."""
        expand = _expander(request.headers.get("content-encoding", "identity").strip().lower())
        self._check_length(_announced(request))
        num_read, began_s, stream = 0, time.monotonic(), request.stream()
        while (part := await _in_time(anext(stream, None), num_read, began_s)) is not None:
            num_read += len(part)
            more = part if expand is None else _expanded(expand, part, self._limits.max_body_bytes + 1 - len(body))
            self._check_length(max(len(body) + len(more), num_read), len(more))
            body += more
            self._hold(len(more))
        if expand is not None and not expand.eof:
            raise RequestError("The compressed body ends before its end; send all of it.")

    def _check_length(self, num_bytes: int, num_more: int | None = None) -> None:
        """Refuse a body of `num_bytes` if it is too large; `num_more` of them are not yet in memory (default: all)."""
        if num_bytes > self._limits.max_body_bytes:
            raise RequestTooLargeError(
                f"The body is longer than {self._limits.max_body_bytes} bytes; send a shorter prompt."
            )
        num_held = self._num_held + (num_bytes if num_more is None else num_more)
        if num_held > (most := BODIES_IN_FLIGHT * self._limits.max_body_bytes):
            raise OverloadedError(
                f"Requests that are being read would hold {num_held} bytes, and {most} are the most here; "
                "send this one again later."
            )

    def _hold(self, num_bytes: int) -> None:
        self._num_held += num_bytes
        self._metrics.body_bytes.set(self._num_held)


async def _in_time(part: Awaitable[Part], num_read: int, began_s: float) -> Part:
    """Return the next part of a body, after `num_read` bytes since `began_s`.

    The time of each part is bounded, and after the first seconds the average time of a byte too.

    Raises:
        RequestTimeoutError: the part comes too late.
    """
    left_s = began_s + BODY_GRACE_S + num_read / MIN_BODY_BYTES_PER_S - time.monotonic()
    try:
        async with asyncio.timeout(min(max(left_s, 0.0), REQUEST_TIMEOUT_S)):
            return await part
    except TimeoutError:
        raise RequestTimeoutError(
            f"{num_read} bytes of the body have come in {time.monotonic() - began_s:.0f} s; send its parts "
            f"within {REQUEST_TIMEOUT_S} s of each other, and {MIN_BODY_BYTES_PER_S} bytes per second on average."
        ) from None


def _drop_mark(body: bytearray) -> int:
    """Remove a leading byte order mark, which some programs write; return its length."""
    length = len(codecs.BOM_UTF8) if body.startswith(codecs.BOM_UTF8) else 0
    del body[:length]
    return length


def _check_type(header: str) -> None:
    """Raise RequestError for any type but JSON, and any charset but UTF-8."""
    content_type, _, parameters = header.lower().partition(";")
    if content_type.strip() != "application/json":
        raise RequestError(f"The content type is {content_type.strip()[:80] or 'missing'}; send application/json.")
    charset = parameters.partition("charset=")[2].partition(";")[0].strip(' "') or "utf-8"
    if charset not in _CHARSETS:
        raise RequestError(f"The charset of the body is {charset[:80]}; JSON is sent in UTF-8.")


def _announced(request: Request) -> int:
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() and len(length) < 20 else 0  # of 64 bits


def _parsed(raw: bytearray, request: Request, schema: type[Schema], *, is_strict: bool) -> Schema:
    check_parts(raw, "The body")
    try:
        return schema.model_validate_json(raw)
    except ValidationError as error:
        if error.error_count() > 1000:  # to list them all would take seconds, and memory
            raise RequestError(
                f"The body has {error.error_count()} unknown fields and mistakes; at most 1000 are read."
            ) from None
        # Unknown fields are forgiven unless the deployment is strict, or they are in a field of ours.
        details = error.errors(include_url=False, include_context=False, include_input=False)
        unknown = [each["loc"] for each in details if each["type"] == "extra_forbidden"]
        if is_strict or not unknown or any(location[0] in _OURS for location in unknown):
            raise as_request_error(error, schema) from None
    # Read the body again without them; a name that may have a meaning elsewhere is reported as ignored.
    names = [str(location[0]) for location in unknown if len(location) == 1]
    body = known_fields(raw, schema, names)
    ignored = [location for location in unknown if len(location) > 1 or body is None or location[0] in body]
    ignore_fields(request, [".".join(map(str, location)) for location in ignored])
    try:
        return schema.model_validate_json(raw if body is None else json.dumps(body), extra="ignore")
    except ValidationError as error:
        raise as_request_error(error, schema) from None


def ignore_fields(request: Request, names: Sequence[str]) -> None:
    """Record names of ignored fields, for the answer's header."""
    if not names:
        return
    known = getattr(request.state, IGNORED_FIELDS, [])
    most = 64
    shown = [name[:256] for name in names[:most]]
    setattr(request.state, IGNORED_FIELDS, [*known, *shown][:most])
    logger.info("%s: %d ignored fields: %s", for_log(request.url.path), len(names), ", ".join(map(for_log, shown)))


def _expanded(expand: zlib._Decompress, part: bytes, max_bytes: int) -> bytes:
    try:
        return expand.decompress(part, max_bytes)
    except zlib.error as error:
        raise RequestError(f"The body does not match its content encoding: {error}.") from None


def _expander(encoding: str) -> zlib._Decompress | None:
    if encoding == "identity":
        return None
    if encoding not in _WINDOW_BITS:
        raise RequestError(f"The content encoding is {encoding!r}; send gzip, deflate, or none.")
    return zlib.decompressobj(_WINDOW_BITS[encoding])
