"""The body of `/v1/chat/completions`, and turns of other chat APIs translated to it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar

from pydantic import Field, ValidationError, WithJsonSchema, model_validator

from protos.client_text import MAX_PARTS
from protos.errors import RequestError
from protos.messages import GrammarKind
from router.requests.body import Body, as_request_error
from router.requests.chat_message import RESULTS, ChatMessageFields
from router.requests.generation_fields import MAX_LOGPROBS, GenerationFields, Int, Seed, SpeculationFields, TokenLimit
from router.requests.json_schema import check_schema_parts
from router.requests.structured_output import Constraint
from router.requests.tools import Tool, ToolUse, tool_use

MAX_TOOLS = 1024
_INSTRUCTIONS = ("system", "developer")
_CHOICE_SCHEMA = {"anyOf": [{"enum": ["none", "auto", "required", None]}, {"type": "object"}]}


Messages = Annotated[list[ChatMessageFields], Field(min_length=1, max_length=MAX_PARTS)]


class ChatPromptFields(Body):
    """The fields of a chat that its prompt is made of."""

    messages: Messages
    model: str | None = None  # the served model if given
    add_special_tokens: bool | None = None  # a chat template writes its own
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    documents: list[Any] | None = None  # read by the templates of models for retrieval
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None  # read by the templates of reasoning models
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Annotated[Any, WithJsonSchema(_CHOICE_SCHEMA)] = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_the_end(self) -> ChatPromptFields:
        check_what_is_asked(self.messages or [])
        if self.continue_final_message and self.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; send one of them.",
                param="continue_final_message",
            )
        check_schema_parts([tool.function.parameters for tool in self.tools or ()], "tools")
        return self

    @property
    def template_variables(self) -> dict[str, object]:
        """Names that the chat template may read; templates switch thoughts off by one of two of them."""
        variables: dict[str, object] = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort is not None:
            variables.setdefault("reasoning_effort", self.reasoning_effort)
        if self.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
        if "enable_thinking" in variables:
            variables.setdefault("thinking", variables["enable_thinking"])
        if self.documents is not None:
            variables.setdefault("documents", self.documents)
        return variables

    @cached_property
    def tool_use(self) -> ToolUse | None:
        """The tools that the model may call; None if it may call none."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)


class ChatCompletionRequest(ChatPromptFields, GenerationFields):
    """The body of `/v1/chat/completions`."""

    max_tokens: TokenLimit | None = None  # OpenAI's older name of max_completion_tokens
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    include_reasoning: bool | None = None

    audio: Any = None
    modalities: Any = None
    moderation: Any = None
    web_search_options: Any = None

    @model_validator(mode="after")
    def _check_combinations(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true.", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise RequestError("max_tokens and max_completion_tokens differ; send one of them.", param="max_tokens")
        if self.tool_use is not None and self.constraint is not None:
            _check_tools_and_constraint(self.tool_use, self.constraint)
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


def check_what_is_asked(messages: list[ChatMessageFields]) -> None:
    """Raise RequestError if the instructions, or the user's last turn after all answers, have an unsupported part.

    Earlier turns are history, which the client cannot change: a note replaces their unsupported parts. The same holds
    for a user's turn that comes with results of tools, since agents send the pictures of a result there.
    """
    roles = [message.role for message in messages]
    first = next((rank for rank, role in enumerate(roles) if role not in _INSTRUCTIONS), len(roles))
    answered = max((rank for rank, role in enumerate(roles) if role == "assistant"), default=-1)
    last = max((rank for rank, role in enumerate(roles) if role == "user"), default=-1)
    asked = [*range(first), *(rank for rank in range(answered + 1, len(roles)) if roles[rank] in _INSTRUCTIONS)]
    has_results = any(role in RESULTS for role in roles[answered + 1 : last])
    asked += [last] if last > answered and not has_results else []
    for rank in asked:
        message = messages[rank]
        if message.content is None:
            raise RequestError(f"a message of role {message.role!r} has no content.", param="messages")
        if message.unread:
            place, kind = message.unread[0]
            name = f"messages.{rank}.content.{place}"
            fault = "has no text" if kind.endswith("text") else f"is of type {kind!r}; this model reads text only"
            raise RequestError(f"{name} {fault}.", param=name)


def unread_parts(messages: list[ChatMessageFields]) -> list[int]:
    """Return the ranks of messages that hold parts which are not read."""
    return [rank for rank, message in enumerate(messages) if message.unread]


def _check_tools_and_constraint(use: ToolUse, constraint: Constraint) -> None:
    """Raise for a constraint that contradicts calls; an answer in JSON may replace an optional call.

    `response_format` is of texts, and required calls have none: instructor sends both.
    """
    if use.is_required and constraint.param != "response_format":
        raise RequestError(
            f"tool_choice requires a call, and {constraint.param} asks for another output; send one of them.",
            param=constraint.param,
        )
    if constraint.kind is not GrammarKind.JSON_SCHEMA:
        raise RequestError(
            f"{constraint.param} cannot be combined with tools; constrain the answer by a JSON schema, "
            "or send tool_choice 'none'.",
            param=constraint.param,
        )


class ForeignFields(Body):
    """The fields of another chat API's body that a chat has too; the last five are ours."""

    # Patterns of the chat's fields, and the names that this API has for them.
    chat_names: ClassVar[Mapping[str, str]] = {}

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    seed: Seed | None = None
    cache_salt: str | None = None
    store: bool | None = None
    receipt: bool | None = None
    speculation: SpeculationFields | None = None

    def shared(self) -> dict[str, Any]:
        """Return these fields as the chat has them."""
        return self.model_dump(include=set(ForeignFields.model_fields), exclude_unset=True)

    @classmethod
    @contextmanager
    def naming_fields(cls) -> Iterator[None]:
        """Make each `RequestError` raised inside name the fields as this API does."""
        try:
            yield
        except RequestError as error:
            for pattern, name in cls.chat_names.items():
                param = re.sub(rf"^{pattern}(?!\w)", name, error.param or "")
                if param != (error.param or ""):
                    error.param = param
                    # Behind an article it is a word and no name.
                    named = rf"(?<!the )(?<!these )(?<!your )\b{pattern}(?!\w)"
                    error.message = re.sub(named, name, error.message, count=1)
                    break
            raise


@dataclass(slots=True)
class ForeignChat:
    """A turn of another chat API, translated to fields and messages of a chat.

    `names` are the messages' in the client's request. `left_out` are ignored parts of it, and `foreign_tools` ignored
    tools: only that API's own servers run them.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, Any]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    foreign_tools: list[str] = field(default_factory=list)

    def add(self, name: str, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.names.append(name)

    def open_answer(self, name: str) -> dict[str, Any]:
        """Return the assistant's message at the end, a new one where another's is."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.add(name, {"role": "assistant"})
        return self.messages[-1]

    def chat_request(self) -> ChatCompletionRequest:
        """Return the chat, validated. Raises `RequestError` if it is not a valid one."""
        given = {name: value for name, value in self.fields.items() if value is not None}
        try:
            return ChatCompletionRequest.model_validate_json(json.dumps({**given, "messages": self.messages}))
        except ValidationError as error:
            raise self._of_message(as_request_error(error, ChatCompletionRequest)) from None
        except RequestError as error:
            raise self._of_message(error) from None

    def _of_message(self, error: RequestError) -> RequestError:
        """Return an error about a message with the client's name of it."""
        place = re.match(r"messages\.(\d+)", error.param or "")
        if place is None or error.param is None:
            return error
        name = self.names[int(place[1])]
        return RequestError(error.message.replace(place[0], name), param=error.param.replace(place[0], name))

    def ignored(self, request: ChatCompletionRequest) -> list[str]:
        """Return the client's names of the fields and parts that the translated request omits."""
        unread = [self.names[rank] for rank in unread_parts(request.messages)]
        return list(dict.fromkeys([*self.foreign_tools, *self.left_out, *unread]))
