"""The validated body of an HTTP request: content type, encoding, size, JSON, schema.

Clients send more fields than any one server knows. Those that no schema has are left out of the body, and named in the
answer's header `X-Ignored-Fields`; `strict_fields` refuses them.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from protos.errors import RequestError, RequestTooLargeError
from router.requests.validation_errors import as_request_error

logger = logging.getLogger(__name__)

Schema = TypeVar("Schema", bound=BaseModel)

IGNORED_FIELDS = "ignored_fields"  # of a request's state
_OURS = ("speculation", "structured_outputs")  # a wrong name in these is a mistake, never another server's field
_MAX_IGNORED = 64
_MAX_MISTAKES = 1000
_WINDOW_BITS = {"gzip": 16 + zlib.MAX_WBITS, "x-gzip": 16 + zlib.MAX_WBITS, "deflate": zlib.MAX_WBITS}


async def read_body(request: Request, schema: type[Schema], max_body_bytes: int, *, is_strict: bool = False) -> Schema:
    """Return the request's body as `schema`; the names of what was left out of it go to the request's state.

    Raises:
        RequestError: it is not declared as JSON, is not JSON, or breaks the schema.
        RequestTooLargeError: it is longer than `max_body_bytes`, as sent or expanded; reading stops there.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RequestError(f"The content type is {content_type or 'missing'}; send application/json.")
    raw = await _read_bytes(request, max_body_bytes)
    try:
        return schema.model_validate_json(raw)
    except ValidationError as error:
        if error.error_count() > _MAX_MISTAKES:  # to list them all would take seconds, and memory
            raise RequestError(
                f"The body has {error.error_count()} unknown fields and mistakes; at most {_MAX_MISTAKES} are read."
            ) from None
        unknown = [details for details in error.errors(include_url=False) if details["type"] == "extra_forbidden"]
        if is_strict or not unknown or _is_ours(unknown):
            raise as_request_error(error, schema) from None
    return _without(json.loads(raw), unknown, request, schema)


def _is_ours(unknown: list[ErrorDetails]) -> bool:
    return any(details["loc"][0] in _OURS for details in unknown)


def _without(body: Any, unknown: list[ErrorDetails], request: Request, schema: type[Schema]) -> Schema:
    """Return the body as `schema` without its unknown fields, and note their names."""
    for details in unknown:
        _remove(body, details["loc"])
    ignore_fields(request, [".".join(map(str, details["loc"])) for details in unknown])
    try:
        return schema.model_validate_json(json.dumps(body))
    except ValidationError as error:
        raise as_request_error(error, schema) from None


def ignore_fields(request: Request, names: Sequence[str]) -> None:
    """Note fields of the request that are read past."""
    if not names:
        return
    known = getattr(request.state, IGNORED_FIELDS, [])
    setattr(request.state, IGNORED_FIELDS, [*known, *names][:_MAX_IGNORED])
    logger.info("%s: ignored fields %s", request.url.path, ascii(names[:_MAX_IGNORED]))


def _remove(value: Any, path: tuple[Any, ...]) -> None:
    """Remove the field at `path`; the parts of it that name a variant of a type are not in the body."""
    *parents, name = path
    for part in parents:
        if (isinstance(value, list) and isinstance(part, int)) or (isinstance(value, dict) and part in value):
            value = value[part]
    if isinstance(value, dict):
        value.pop(name, None)


async def _read_bytes(request: Request, max_body_bytes: int) -> bytes:
    """Return the body, expanded if it is compressed."""
    expand = _expander(request.headers.get("content-encoding", "identity").strip().lower())
    body = bytearray()
    num_read = 0
    async for part in request.stream():
        num_read += len(part)
        try:
            body += part if expand is None else expand.decompress(part, max_body_bytes + 1 - len(body))
        except zlib.error as error:
            raise RequestError(f"The body is not what its content encoding says: {error}.") from None
        if max(len(body), num_read) > max_body_bytes:
            raise RequestTooLargeError(f"The body is longer than {max_body_bytes} bytes; send a shorter prompt.")
    if expand is not None and not expand.eof:
        raise RequestError("The compressed body ends before its end; send all of it.")
    return bytes(body)


def _expander(encoding: str) -> zlib._Decompress | None:
    if encoding == "identity":
        return None
    if encoding not in _WINDOW_BITS:
        raise RequestError(f"The content encoding is {encoding!r}; send gzip, deflate, or none.")
    return zlib.decompressobj(_WINDOW_BITS[encoding])
