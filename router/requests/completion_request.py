"""The body of `/v1/completions`: prompts as text or token ids."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from protos.errors import RequestError
from router.requests.body import Body
from router.requests.chat_request import ChatPromptFields, Messages
from router.requests.generation_fields import MAX_LOGPROBS, GenerationFields, Int, PromptLimit, TokenLimitOrZero

MAX_PROMPTS = 4096  # of one body; the number of choices bounds them further

_TEXT_SCHEMA: dict[str, Any] = {"type": "string", "minLength": 1}
_TOKENS_SCHEMA: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_SEVERAL_SCHEMA = {"type": "array", "items": {"anyOf": [_TEXT_SCHEMA, _TOKENS_SCHEMA]}, "minItems": 1}
_PROMPT_SCHEMA = {"anyOf": [_TEXT_SCHEMA, _TOKENS_SCHEMA, _SEVERAL_SCHEMA]}


def _check_prompt(value: object) -> object:
    """Check a text, token ids, or a list of either; pydantic's error for such a union does not name the fault."""
    if isinstance(value, str):
        return _refuse_empty(value, "prompt")
    if not isinstance(value, list):
        raise RequestError("prompt must be a string, a list of token ids, or a list of either.", param="prompt")
    _refuse_empty(value, "prompt")
    if set(map(type, value)) == {int}:  # a million of them in some milliseconds
        return value
    if len(value) > MAX_PROMPTS:
        raise RequestError(f"prompt holds {len(value)} prompts; send at most {MAX_PROMPTS}.", param="prompt")
    for rank, item in enumerate(value):
        _check_one_prompt(item, f"prompt[{rank}]")
    return value


def _check_one_prompt(value: object, name: str) -> None:
    is_token_ids = isinstance(value, list) and all(type(item) is int for item in value)
    if not is_token_ids and not isinstance(value, str):
        raise RequestError(f"{name} is neither a string nor a list of token ids.", param="prompt")
    _refuse_empty(value, name)


def _refuse_empty(value: object, name: str) -> object:
    if not value:
        raise RequestError(f"{name} is empty; send at least one token.", param="prompt")
    return value


class CompletionRequest(GenerationFields):
    """The body of `/v1/completions`."""

    prompt: Annotated[Any, BeforeValidator(_check_prompt), WithJsonSchema(_PROMPT_SCHEMA)]
    max_tokens: TokenLimitOrZero | None = None
    logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Int | None = None
    suffix: Any = None

    @model_validator(mode="after")
    def _only_an_echo_has_no_tokens(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise RequestError(
                "max_tokens is 0; it must be at least 1, -1 for what fits, or 0 with echo, which reads the prompt.",
                param="max_tokens",
            )
        return self

    @model_validator(mode="after")
    def _refuse_best_of(self) -> CompletionRequest:
        if self.best_of not in (None, self.n or 1):
            raise RequestError(
                f"best_of is {self.best_of}; choosing among hidden candidates is not supported, ask for n.",
                param="best_of",
            )
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, one or several, each a text or token ids."""
        is_single = isinstance(self.prompt, str) or type(self.prompt[0]) is int
        return [self.prompt] if is_single else self.prompt


class TokenizeRequest(ChatPromptFields):
    """The body of `/tokenize`: a text, or a chat with all that its prompt is made of.

    `add_special_tokens` is true for a text where it is left out, and false for a chat, whose template writes its own.
    """

    prompt: str | None = None
    messages: Messages | None = None  # type: ignore[assignment]
    truncate_prompt_tokens: PromptLimit | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _needs_one_source(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise RequestError("send either prompt or messages.", param="prompt")
        return self


class DetokenizeRequest(Body):
    """The body of `/detokenize`."""

    model: str | None = None
    tokens: list[int]
    skip_special_tokens: bool = False
