"""The validated body of an HTTP request: content type, size, JSON, schema."""

from __future__ import annotations

from typing import TypeVar

from fastapi import Request
from pydantic import BaseModel, ValidationError

from protos.errors import RequestError, RequestTooLargeError
from router.requests.validation_errors import as_request_error

Schema = TypeVar("Schema", bound=BaseModel)


async def read_body(request: Request, schema: type[Schema], max_body_bytes: int) -> Schema:
    """Return the request's body as `schema`.

    Raises:
        RequestError: it is not declared as JSON, is not JSON, or breaks the schema.
        RequestTooLargeError: it is longer than `max_body_bytes`; reading stops there.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise RequestError(f"The content type is {content_type or 'missing'}; send application/json.")
    raw = await _read_bytes(request, max_body_bytes)
    try:
        return schema.model_validate_json(raw)
    except ValidationError as error:
        raise as_request_error(error, schema) from None


async def _read_bytes(request: Request, max_body_bytes: int) -> bytes:
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_body_bytes:
            raise RequestTooLargeError(f"The body is longer than {max_body_bytes} bytes; send a shorter prompt.")
    return bytes(body)
