"""Answers of `/v1/chat/completions`: OpenAI's types with our fields added, and their writer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

from openai.types import Completion, CompletionChoice
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionMessageToolCallUnion,
    chat_completion,
    chat_completion_chunk,
)
from openai.types.chat.chat_completion_chunk import (
    ChoiceDelta,
    ChoiceDeltaToolCall,
    ChoiceDeltaToolCallFunction,
    ChoiceLogprobs,
)
from openai.types.chat.chat_completion_message_function_tool_call import Function

from router.generation.delta import Delta, ToolCallDelta, join_deltas, whole_calls
from router.generation.generation import Generation
from router.generation.receipts import Receipt
from router.openai.response_writer import ResponseWriter, openai_reason
from router.openai.usage import (
    ApproximateSpeculation,
    CompletionLogprobs,
    DraftEvent,
    PromptLogprob,
    ResponseMetrics,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)
from router.tokenizer import Tokenizer


class TextChoice(CompletionChoice):
    """A choice of `/v1/completions`; in a stream the finish reason is null until the end, as OpenAI sends it."""

    finish_reason: Literal["stop", "length", "content_filter"] | None = None  # type: ignore[assignment]
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: tuple[int, ...] | None = None  # in a stream, with the first chunk of the choice
    token_sources: list[str] | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None


class TextCompletion(Completion):
    """The answer of `/v1/completions`, in full or one chunk of it."""

    choices: list[TextChoice]  # type: ignore[assignment]
    metrics: ResponseMetrics | None = None
    x_speculation: ApproximateSpeculation | None = None
    x_drafts: list[DraftEvent] | None = None
    receipt: Receipt | None = None


class CompletionWriter(ResponseWriter):
    """Writes full answers and chunks, which have the same shape."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        super().__init__(generation, tokenizer)
        self._started: set[int] = set()

    def full(self, gained: Sequence[Sequence[Delta]]) -> TextCompletion:
        choices = [join_deltas(deltas) for deltas in gained]
        written = [self._choice(choice, **self._prompt_token_ids(choice.index)) for choice in choices]
        return self._completion(written, self._accounts())

    def _chunks(self, piece: Delta) -> Iterable[TextCompletion]:
        if self._has_news(piece):
            prompt = {} if piece.index in self._started else self._prompt_token_ids(piece.index)
            self._started.add(piece.index)
            yield self._completion([self._choice(piece, **prompt)], self._chunk_accounts(piece))
        if piece.draft_ids:
            yield TextCompletion(object="text_completion", **self._drafts(piece))

    def last_chunks(self) -> Iterable[TextCompletion]:
        if self._fields.has_usage_chunk:
            yield self._completion([], self._accounts())

    def _completion(self, choices: list[TextChoice], accounts: dict[str, Any]) -> TextCompletion:
        return TextCompletion(object="text_completion", choices=choices, **self._envelope(), **accounts)

    def _choice(self, delta: Delta, **fields: Any) -> TextChoice:
        return TextChoice(
            index=delta.index,
            text=delta.text,
            finish_reason=cast(Literal["stop", "length"] | None, openai_reason(delta.finish_reason)),
            logprobs=completion_logprobs(delta, self._tokenizer),
            **self._token_ids(delta),
            **fields,
            **prompt_logprobs(delta, self._fields.prompt_logprobs, self._tokenizer),
        )


class ChatChoice(chat_completion.Choice):
    """A choice of `/v1/chat/completions`."""

    token_ids: list[int] | None = None
    token_sources: list[str] | None = None


class Chat(ChatCompletion):
    """The full answer of `/v1/chat/completions`."""

    choices: list[ChatChoice]  # type: ignore[assignment]
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_logprobs: list[dict[int, PromptLogprob] | None] | None = None
    metrics: ResponseMetrics | None = None
    x_speculation: ApproximateSpeculation | None = None
    receipt: Receipt | None = None


class ChatChunkChoice(chat_completion_chunk.Choice):
    """A choice in a chunk of `/v1/chat/completions`."""

    token_ids: list[int] | None = None
    token_sources: list[str] | None = None


class ChatChunk(ChatCompletionChunk):
    """One chunk of a streamed `/v1/chat/completions`."""

    choices: list[ChatChunkChoice]  # type: ignore[assignment]
    metrics: ResponseMetrics | None = None
    x_speculation: ApproximateSpeculation | None = None
    receipt: Receipt | None = None
    x_drafts: list[DraftEvent] | None = None
    prompt_token_ids: tuple[int, ...] | None = None  # with the first chunk


class ChatWriter(ResponseWriter):
    """Writes full answers and chunks; the first chunk of each choice names the role."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        super().__init__(generation, tokenizer)
        self._started: set[int] = set()

    def full(self, gained: Sequence[Sequence[Delta]]) -> Chat:
        choices = [join_deltas(deltas) for deltas in gained]
        return Chat(
            object="chat.completion",
            choices=[self._full_choice(choice) for choice in choices],
            **self._envelope(),
            **self._accounts(),
            **self._prompt_token_ids(0),
            **prompt_logprobs(choices[0], self._fields.prompt_logprobs, self._tokenizer),
        )

    def _begin(self, delta: Delta) -> Iterable[ChatChunk]:
        if delta.index not in self._started:
            prompt = {} if self._started else self._prompt_token_ids(0)
            self._started.add(delta.index)
            role = ChoiceDelta(role="assistant", content="")
            yield self._chunk(delta.index, role, {**self._usage_so_far(), **prompt})

    def _chunks(self, piece: Delta) -> Iterable[ChatChunk]:
        if self._has_news(piece):
            yield self._chunk(
                piece.index,
                _chat_delta(piece),
                self._chunk_accounts(piece),
                finish_reason=openai_reason(piece.finish_reason),
                logprobs=self._chunk_logprobs(piece),
                **self._token_ids(piece),
            )
        if piece.draft_ids:
            yield ChatChunk(object="chat.completion.chunk", **self._drafts(piece))

    def last_chunks(self) -> Iterable[ChatChunk]:
        if self._fields.has_usage_chunk:
            yield ChatChunk(object="chat.completion.chunk", choices=[], **self._envelope(), **self._accounts())

    def _chunk(self, index: int, delta: ChoiceDelta, accounts: dict[str, Any], **choice: Any) -> ChatChunk:
        fields = {"finish_reason": None, "logprobs": None, **choice}
        return ChatChunk(
            object="chat.completion.chunk",
            choices=[ChatChunkChoice(index=index, delta=delta, **fields)],
            **self._envelope(),
            **accounts,
        )

    def _chunk_logprobs(self, delta: Delta) -> ChoiceLogprobs | None:
        content = chat_logprobs(delta, self._tokenizer)
        return None if content is None else ChoiceLogprobs(content=content, refusal=None)

    def _full_choice(self, delta: Delta) -> ChatChoice:
        content = chat_logprobs(delta, self._tokenizer)
        reason = openai_reason(delta.finish_reason)
        assert reason is not None
        return ChatChoice(
            index=delta.index,
            message=_chat_message(delta),
            finish_reason=reason,
            logprobs=None if content is None else chat_completion.ChoiceLogprobs(content=content, refusal=None),
            **self._token_ids(delta),
        )


def _chat_message(delta: Delta) -> ChatCompletionMessage:
    """Return the assistant's message; one that is all tool calls has no content."""
    thoughts = _thoughts(delta)
    if not delta.tool_calls:
        return ChatCompletionMessage(role="assistant", content=delta.text, refusal=None, **thoughts)
    calls = _full_calls(delta.tool_calls)
    return ChatCompletionMessage(
        role="assistant", content=delta.text or None, refusal=None, tool_calls=calls, **thoughts
    )


def _thoughts(delta: Delta) -> dict[str, Any]:
    """Return the thoughts under one name, vLLM's and OpenRouter's: clients that know two add up what both hold."""
    return {"reasoning": delta.reasoning} if delta.reasoning else {}


def _full_calls(deltas: Sequence[ToolCallDelta]) -> list[ChatCompletionMessageToolCallUnion]:
    return [
        ChatCompletionMessageFunctionToolCall(
            id=call.id or "", type="function", function=Function(name=call.name or "", arguments=call.arguments)
        )
        for call in whole_calls(deltas)
    ]


def _chat_delta(delta: Delta) -> ChoiceDelta:
    """Return the gain of a streamed message."""
    gained: dict[str, Any] = {"content": delta.text} if delta.text else {}
    gained |= _thoughts(delta)
    if delta.tool_calls:
        gained["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
    return ChoiceDelta(**gained)


def _call_delta(call: ToolCallDelta) -> ChoiceDeltaToolCall:
    if call.id is None:
        return ChoiceDeltaToolCall(index=call.index, function=ChoiceDeltaToolCallFunction(arguments=call.arguments))
    function = ChoiceDeltaToolCallFunction(name=call.name, arguments=call.arguments)
    return ChoiceDeltaToolCall(index=call.index, id=call.id, type="function", function=function)
