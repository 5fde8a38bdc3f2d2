"""Answers in OpenAI's form: the `openai` package's own types, with our fields beside theirs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import (
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionMessage,
    ChatCompletionMessageFunctionToolCall,
    ChatCompletionMessageToolCallUnion,
    ChatCompletionTokenLogprob,
    chat_completion,
    chat_completion_chunk,
)
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceDeltaToolCall, ChoiceDeltaToolCallFunction
from openai.types.chat.chat_completion_message_function_tool_call import Function
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails
from pydantic import BaseModel

from protos.messages import SpeculationStats, StepStats, TokenLogprobs
from router.generation.delta import Delta, ToolCallDelta
from router.generation.usage import Usage
from router.tokenizer.tokenizer import Tokenizer

_MIN_LOGPROB = -9999.0  # JSON has no minus infinity; OpenAI's word for "very unlikely"


class SpeculativeDecoding(BaseModel):
    """What speculation did for one request; the names are vLLM's, which aiperf reads."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: dict[str, int]  # verification passes by number of accepted drafts
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_steps: int

    @classmethod
    def of(cls, stats: SpeculationStats) -> SpeculativeDecoding:
        histogram = {str(accepted): passes for accepted, passes in enumerate(stats.accepted_histogram) if passes}
        return cls(
            mean_acceptance_length=stats.mean_acceptance_length,
            draft_acceptance_rate=stats.draft_acceptance_rate,
            acceptance_histogram=histogram,
            num_accepted_draft_tokens=stats.num_accepted_tokens,
            num_draft_tokens=stats.num_draft_tokens,
            num_spec_steps=stats.num_passes,
        )


class ResponseMetrics(BaseModel):
    """`metrics` of a response body or of a stream's last chunk."""

    speculative_decoding: SpeculativeDecoding | None = None

    @classmethod
    def of(cls, usage: Usage) -> ResponseMetrics | None:
        return cls(speculative_decoding=SpeculativeDecoding.of(usage.speculation)) if usage.speculation else None


class ApproximateSpeculation(BaseModel):
    """`x_speculation`: this output is not what the target alone would have said; absent wherever it is."""

    exact: Literal[False] = False
    steps_from_draft: int
    steps_rejected: int
    tokens_from_draft: int

    @classmethod
    def of(cls, stats: StepStats) -> ApproximateSpeculation:
        return cls(
            exact=False,
            steps_from_draft=stats.num_accepted,
            steps_rejected=stats.num_judged - stats.num_accepted,
            tokens_from_draft=stats.num_accepted_tokens,
        )


class CompletionLogprobs(Logprobs):
    """As OpenAI's, whose servers also send null for a token without a prediction (an echoed prompt's)."""

    token_logprobs: list[float | None] | None = None  # type: ignore[assignment]
    top_logprobs: list[dict[str, float] | None] | None = None  # type: ignore[assignment]


class TextChoice(CompletionChoice):
    """A choice of `/v1/completions`; in a stream the finish reason is null until the end, as OpenAI sends it."""

    finish_reason: Literal["stop", "length", "content_filter"] | None = None  # type: ignore[assignment]
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | None = None


class TextCompletion(Completion):
    """The answer of `/v1/completions`, whole or one chunk of it."""

    choices: list[TextChoice]  # type: ignore[assignment]
    metrics: ResponseMetrics | None = None
    x_speculation: ApproximateSpeculation | None = None


class ChatChoice(chat_completion.Choice):
    """A choice of `/v1/chat/completions`."""

    token_ids: list[int] | None = None


class Chat(ChatCompletion):
    """The whole answer of `/v1/chat/completions`."""

    choices: list[ChatChoice]  # type: ignore[assignment]
    metrics: ResponseMetrics | None = None
    x_speculation: ApproximateSpeculation | None = None


class ChatChunkChoice(chat_completion_chunk.Choice):
    """A choice in a chunk of `/v1/chat/completions`."""

    token_ids: list[int] | None = None


class ChatChunk(ChatCompletionChunk):
    """One chunk of a streamed `/v1/chat/completions`."""

    choices: list[ChatChunkChoice]  # type: ignore[assignment]
    metrics: ResponseMetrics | None = None
    x_speculation: ApproximateSpeculation | None = None


def usage_object(usage: Usage) -> CompletionUsage:
    """`usage`: without a prediction, accepted and rejected drafts are reported where OpenAI reports predictions."""
    return CompletionUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=usage.prediction_tokens.accepted_tokens,
            rejected_prediction_tokens=usage.prediction_tokens.rejected_tokens,
        ),
    )


def completion_logprobs(delta: Delta, tokenizer: Tokenizer) -> CompletionLogprobs | None:
    """The logprobs of `/v1/completions`: parallel lists, the alternatives by text. None if there are none."""
    if not delta.logprobs:
        return None
    return CompletionLogprobs(
        tokens=[tokenizer.token_text(token_id) for token_id in delta.token_ids],
        token_logprobs=[_finite(position.logprob) if position else None for position in delta.logprobs],
        top_logprobs=[_top_by_text(position, tokenizer) if position else None for position in delta.logprobs],
        text_offset=list(delta.text_offsets),
    )


def chat_logprobs(delta: Delta, tokenizer: Tokenizer) -> list[ChatCompletionTokenLogprob] | None:
    """The logprobs of `/v1/chat/completions`: one object per token, with its bytes. None if there are none."""
    positions = [position for position in delta.logprobs if position is not None]
    if not positions:
        return None
    return [
        ChatCompletionTokenLogprob(
            token=tokenizer.token_text(position.token_id),
            bytes=list(tokenizer.token_bytes(position.token_id)),
            logprob=_finite(position.logprob),
            top_logprobs=[
                TopLogprob(
                    token=tokenizer.token_text(token_id),
                    bytes=list(tokenizer.token_bytes(token_id)),
                    logprob=_finite(logprob),
                )
                for token_id, logprob in position.top
            ],
        )
        for position in positions
    ]


def chat_message(delta: Delta) -> ChatCompletionMessage:
    """The assistant's message; one that is all tool calls has no content."""
    if not delta.tool_calls:
        return ChatCompletionMessage(role="assistant", content=delta.text, refusal=None)
    return ChatCompletionMessage(
        role="assistant", content=delta.text or None, refusal=None, tool_calls=_whole_calls(delta.tool_calls)
    )


def _whole_calls(deltas: Sequence[ToolCallDelta]) -> list[ChatCompletionMessageToolCallUnion]:
    """Each call's first delta names it, and all of them together hold its arguments."""
    return [
        ChatCompletionMessageFunctionToolCall(
            id=first.id,
            type="function",
            function=Function(
                name=first.name or "",
                arguments="".join(delta.arguments for delta in deltas if delta.index == first.index),
            ),
        )
        for first in deltas
        if first.id is not None
    ]


def chat_delta(delta: Delta) -> ChoiceDelta:
    """What a streamed message gained."""
    gained: dict[str, Any] = {"content": delta.text} if delta.text else {}
    if delta.tool_calls:
        gained["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
    return ChoiceDelta(**gained)


def _call_delta(call: ToolCallDelta) -> ChoiceDeltaToolCall:
    if call.id is None:
        return ChoiceDeltaToolCall(index=call.index, function=ChoiceDeltaToolCallFunction(arguments=call.arguments))
    function = ChoiceDeltaToolCallFunction(name=call.name, arguments=call.arguments)
    return ChoiceDeltaToolCall(index=call.index, id=call.id, type="function", function=function)


def _top_by_text(position: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """The most likely tokens and the chosen one; of two tokens with the same text the likelier one is shown."""
    top: dict[str, float] = {}
    for token_id, logprob in (*position.top, (position.token_id, position.logprob)):
        top.setdefault(tokenizer.token_text(token_id), _finite(logprob))
    return top


def _finite(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)
