"""The bodies that each endpoint accepts: what it is asked about, and how its answer is to look."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from protos.errors import RequestError
from protos.messages import Grammar, GrammarKind
from router.requests.body import Body
from router.requests.generation_fields import GenerationFields, TokenCount, TokenCountOrZero
from router.requests.json_text import read_json
from router.requests.tools import Tool, ToolUse, tool_use

_MAX_LOGPROBS = 20


def _check_prompt(value: object) -> object:
    """A text, token ids, or a list of either; pydantic's message for such a union names everything but the fault."""
    if isinstance(value, str):
        return _refuse_empty(value, "prompt")
    if not isinstance(value, list):
        raise RequestError("prompt must be a string, a list of token ids, or a list of either.", param="prompt")
    _refuse_empty(value, "prompt")
    if all(type(item) is int for item in value):
        return value
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

    prompt: Annotated[Any, BeforeValidator(_check_prompt)]
    max_tokens: TokenCountOrZero | None = None
    logprobs: Annotated[int, Field(ge=0, le=_MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: Any = None

    @model_validator(mode="after")
    def _only_an_echo_has_no_tokens(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise RequestError(
                "max_tokens is 0; it must be at least 1, or 0 with echo, which reads the prompt alone.",
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


def _join_text_parts(value: object) -> object:
    if not isinstance(value, list):
        return value
    texts = []
    for rank, part in enumerate(value):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RequestError(f"content[{rank}] is of type {kind!r}; this model reads text only.", param="messages")
        texts.append(part["text"])
    return "".join(texts)


_SAID_ELSEWHERE = {"annotations", "parsed"}  # of an answer that is sent back as it came; `content` says it all


class ChatMessageFields(Body):
    """One message, an answer of ours as `model_dump()` writes it included.

    `developer` is OpenAI's newer name of `system`; templates know the older one.
    """

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | None, BeforeValidator(_join_text_parts)] = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    annotations: Any = None
    parsed: Any = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _needs_content(self) -> ChatMessageFields:
        if self.content is None and self.role != "assistant":
            raise RequestError(f"a message of role {self.role!r} has no content.", param="messages")
        return self

    def for_template(self) -> dict[str, object]:
        """The message as chat templates expect it: the arguments of calls are objects there, not JSON texts."""
        fields = self.model_dump(exclude_none=True, exclude=_SAID_ELSEWHERE)
        if self.tool_calls is not None:
            fields["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        if self.role == "developer":
            fields["role"] = "system"
        return fields


def _call_for_template(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RequestError("a message's tool call has no function with a name.", param="messages")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        arguments = read_json(arguments, "the arguments of a message's tool call", "messages")
    return {**call, "function": {**function, "arguments": arguments}}


class ChatCompletionRequest(GenerationFields):
    """The body of `/v1/chat/completions`."""

    messages: Annotated[list[ChatMessageFields], Field(min_length=1)]
    max_tokens: TokenCount | None = None  # OpenAI's older name of max_completion_tokens
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=_MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None  # read by the templates of reasoning models
    tools: list[Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None

    audio: Any = None
    modalities: Any = None
    moderation: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatCompletionRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError("max_tokens and max_completion_tokens differ; send one of them.", param="max_tokens")
        if self.tool_use is not None and self.grammar is not None:
            _check_tools_and_grammar(self.tool_use, self.grammar)
        return self

    @property
    def tool_use(self) -> ToolUse | None:
        """The tools the model may call, None if it may call none."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


def _check_tools_and_grammar(use: ToolUse, grammar: Grammar) -> None:
    """An answer in JSON may be chosen instead of a call; anything else beside calls is a contradiction."""
    if use.is_required:
        raise RequestError(
            f"tool_choice requires a call, and {grammar.param} asks for another output; send one of them.",
            param=grammar.param,
        )
    if grammar.kind is not GrammarKind.JSON_SCHEMA:
        raise RequestError(
            f"{grammar.param} cannot be combined with tools; constrain the answer by a JSON schema, "
            "or send tool_choice 'none'.",
            param=grammar.param,
        )


class TokenizeRequest(Body):
    """The body of `/tokenize`: a text or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessageFields], Field(min_length=1)] | None = None
    add_special_tokens: bool = True  # of a text; a chat template writes its own
    add_generation_prompt: bool = True
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
