"""Every failure as OpenAI's error object."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Literal

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from typing_extensions import TypedDict

from protos.errors import (
    ContextLengthError,
    EngineError,
    NotFoundError,
    OverloadedError,
    RequestError,
    RequestTooLargeError,
    ServingError,
)
from router.api_keys import current_client

_MESSAGES = "/v1/messages"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_AGAIN = "X-Should-Retry"  # OpenAI's and Anthropic's clients read it
_FULL = "X-Outrider-Full"  # for the proxy (cluster/proxy/refusals.cfg), which removes it


class ErrorFields(TypedDict):
    """`error` of OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(TypedDict):
    """Every failure except on `/v1/messages`."""

    error: ErrorFields


class MessagesErrorFields(TypedDict):
    """`error` of Anthropic's error object."""

    type: str
    message: str


class MessagesError(TypedDict):
    """A failure of `/v1/messages`."""

    type: Literal["error"]
    error: MessagesErrorFields


def error_object(error: ServingError) -> ErrorAnswer:
    """Return the JSON body of an error."""
    return {
        "error": {"message": error.message, "type": error.error_type, "param": error.param, "code": error.code},
    }


def error_response(error: ServingError, status: int | None = None) -> JSONResponse:
    """Return the HTTP answer for an error, with `status` in place of the error's own if given."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, OverloadedError):
        headers[_FULL] = "1"
    if error.is_final:
        headers[_AGAIN] = "false"
    return JSONResponse(error_object(error), status_code=status or error.http_status, headers=headers)


def add_error_handlers(app: FastAPI) -> None:
    """Make the app answer every exception in OpenAI's form."""
    app.add_exception_handler(ServingError, _on_serving_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected_error)


def anthropic_error_object(error: ServingError) -> MessagesError:
    """Return the JSON body of an error of `/v1/messages`."""
    kind = _ANTHROPIC_TYPES.get(error.http_status, "api_error")
    message = _anthropic_length(error) if isinstance(error, ContextLengthError) else error.message
    return {"type": "error", "error": {"type": kind, "message": message}}


def _anthropic_length(error: ContextLengthError) -> str:
    """Return Anthropic's own words: Claude Code matches them to shorten a conversation or its max_tokens."""
    if error.max_tokens is None:
        return f"prompt is too long: {error.num_prompt_tokens} tokens > {error.max_model_len - 1} maximum"
    return (
        f"input length and `max_tokens` exceed context limit: {error.num_prompt_tokens} + {error.max_tokens} > "
        f"{error.max_model_len}, decrease input length or `max_tokens` and try again"
    )


async def _on_serving_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    if isinstance(error, RequestError | RequestTooLargeError):
        current_client.get().charge_refusal(getattr(request.state, "num_body_bytes", 0))
    return _answer(request, error)


def _answer(request: Request, error: ServingError, status: int | None = None) -> Response:
    """Return the error in the form of the API that was called."""
    response = error_response(error, status)
    if not request.url.path.startswith(_MESSAGES):
        return response
    headers = {name: response.headers[name] for name in ("Retry-After", _AGAIN, _FULL) if name in response.headers}
    return JSONResponse(anthropic_error_object(error), status_code=response.status_code, headers=headers)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    """Answer the framework's own refusals: unknown path, wrong method."""
    assert isinstance(error, HTTPException)
    if error.status_code == HTTPStatus.NOT_FOUND:
        return _answer(request, NotFoundError(f"There is nothing at {request.url.path}."))
    message = f"{request.method} {request.url.path}: {error.detail}."
    response = _answer(request, RequestError(message), error.status_code)
    response.headers.update(error.headers or {})
    return response


async def _on_disconnect(_: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nginx's code; it only ever reaches logs and metrics


async def _on_unexpected_error(request: Request, error: Exception) -> Response:
    """Answer a fault of ours. Starlette raises it again after this answer, so that the server logs it once."""
    return _answer(request, EngineError("The server failed while handling this request; it is a server fault."))
