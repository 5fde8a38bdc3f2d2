"""Every error a user can meet, with its HTTP status and its gRPC code.

A message names the value that was wrong, the limit it broke, and the remedy. The frontends map any `ServingError` to
the wire by its class attributes alone; nothing else in the project knows a status code.
"""

from __future__ import annotations


class ServingError(Exception):
    """Base of all errors that reach a user.

    Attributes:
        http_status: status code of the HTTP answer.
        grpc_code: name of the `grpc.StatusCode` member.
        error_type: `type` of OpenAI's error object.
        code: `code` of OpenAI's error object, if clients need to distinguish this error from others of its type.
        param: the request field at fault, if any.
        retry_after_s: wait in seconds before a retry may succeed; the class has a default.
        is_final: the same request would fail again, or cost as much again; OpenAI's and Anthropic's clients repeat
            every other 5xx twice by themselves.
    """

    http_status = 500
    grpc_code = "INTERNAL"
    error_type = "server_error"
    code: str | None = None
    usual_retry_after_s: float | None = None
    is_final = False

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = self.usual_retry_after_s if retry_after_s is None else retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        """Keep `param` and `retry_after_s` when pickled; the default would pass `args` alone."""
        return _rebuild, (type(self), self.message, self.param, self.retry_after_s)


def _rebuild(kind: type[ServingError], message: str, param: str | None, retry_after_s: float | None) -> ServingError:
    return kind(message, param=param, retry_after_s=retry_after_s)


class RequestError(ServingError):
    """The request itself is wrong; sending it again cannot help."""

    http_status = 400
    grpc_code = "INVALID_ARGUMENT"
    error_type = "invalid_request_error"


class ContextLengthError(RequestError):
    """A prompt, or prompt and output together, are longer than the model's context.

    Attributes:
        num_prompt_tokens: tokens of the prompt; a lower bound if it was not tokenized completely.
        max_model_len: the model's context.
        max_tokens: requested output tokens; None if the prompt alone is too long.
    """

    code = "context_length_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
        num_prompt_tokens: int = 0,
        max_model_len: int = 0,
        max_tokens: int | None = None,
    ) -> None:
        super().__init__(message, param=param, retry_after_s=retry_after_s)
        self.num_prompt_tokens = num_prompt_tokens
        self.max_model_len = max_model_len
        self.max_tokens = max_tokens

    @classmethod
    def of_prompt(cls, name: str, num_tokens: int, max_model_len: int, more: str = "") -> ContextLengthError:
        """Return the error of a prompt, worded as OpenAI's clients expect; `name` is its parameter."""
        return cls(
            f"This model's maximum context length is {max_model_len} tokens. However, your {name} resulted in "
            f"{num_tokens} tokens{more}. Please reduce the length of the {name}; {max_model_len - 1} leave room for an "
            "answer.",
            param=name,
            num_prompt_tokens=num_tokens,
            max_model_len=max_model_len,
        )


class GrammarError(RequestError):
    """The grammar of the answer does not allow any further token or the end."""

    code = "grammar_dead_end"


class AuthenticationError(ServingError):
    """The API key is missing or unknown."""

    http_status = 401
    grpc_code = "UNAUTHENTICATED"
    error_type = "authentication_error"
    code = "invalid_api_key"


class PermissionDeniedError(ServingError):
    """The client may not do this."""

    http_status = 403
    grpc_code = "PERMISSION_DENIED"
    error_type = "permission_error"


class NotFoundError(ServingError):
    """The named model or path does not exist."""

    http_status = 404
    grpc_code = "NOT_FOUND"
    error_type = "not_found_error"


class ConflictError(ServingError):
    """Another operation in progress excludes this one; retry when it has ended."""

    http_status = 409
    grpc_code = "ABORTED"
    error_type = "conflict_error"
    code = "conflict"


class ModelNotFoundError(NotFoundError):
    """The request names a model that is not served here."""

    code = "model_not_found"


class MisdirectedRequestError(ServingError):
    """The request names another server as its host."""

    http_status = 421
    grpc_code = "INVALID_ARGUMENT"
    error_type = "invalid_request_error"


class RequestTooLargeError(ServingError):
    """The body is longer than the server reads."""

    http_status = 413
    grpc_code = "RESOURCE_EXHAUSTED"
    error_type = "invalid_request_error"


class RequestTimeoutError(ServingError):
    """The client sent its request too slowly."""

    http_status = 408
    grpc_code = "DEADLINE_EXCEEDED"
    error_type = "timeout_error"


class RateLimitError(ServingError):
    """The tenant has used up its own limit; the server has room for others."""

    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    error_type = "rate_limit_error"
    code = "rate_limit_exceeded"
    usual_retry_after_s = 1.0


class OverloadedError(ServingError):
    """The server is at capacity and did not accept the request; it may be sent again later."""

    http_status = 503
    grpc_code = "RESOURCE_EXHAUSTED"
    error_type = "service_unavailable_error"
    code = "overloaded"
    usual_retry_after_s = 1.0


class UnavailableError(ServingError):
    """No healthy replica can take the request now (starting, draining, or restarting)."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    error_type = "service_unavailable_error"
    usual_retry_after_s = 1.0


class EngineLostError(UnavailableError):
    """The engine ended while it held the request: through its own fault, this request's or another one's."""


class ModelChangedError(ServingError):
    """The pairs now serve another model than the one the request was prepared for."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    error_type = "service_unavailable_error"
    code = "model_changed"
    usual_retry_after_s = 1.0


class ShuttingDownError(ServingError):
    """The application is being deleted and no replica is left, so waiting is useless."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    error_type = "service_unavailable_error"


class DeadlineExceededError(ServingError):
    """The request's own deadline passed before it finished."""

    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    error_type = "timeout_error"
    is_final = True


class EngineError(ServingError):
    """The engine failed while computing: a server fault."""


class GivenUpError(EngineError):
    """Several engines ended while they computed the request, which may be the cause."""

    is_final = True


class NonFiniteLogitsError(ServingError):
    """The model's logits are not finite for this text; every other replica would fail the same way."""

    code = "non_finite_logits"
    is_final = True


class ConfigError(ServingError):
    """The machine, a model folder or deploy.yaml rules the configuration out; raised at startup only."""
