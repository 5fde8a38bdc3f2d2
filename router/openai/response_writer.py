"""How one generation is written for a client of each OpenAI endpoint: whole, or chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, Protocol, cast

from openai.types.chat import chat_completion
from openai.types.chat.chat_completion_chunk import ChoiceDelta, ChoiceLogprobs
from pydantic import BaseModel

from protos.messages import FinishReason
from router.generation.delta import Delta
from router.generation.generation import Generation
from router.openai.responses import (
    ApproximateSpeculation,
    Chat,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ResponseMetrics,
    TextChoice,
    TextCompletion,
    chat_delta,
    chat_logprobs,
    chat_message,
    completion_logprobs,
    usage_object,
)
from router.tokenizer.tokenizer import Tokenizer

OpenAIFinishReason = Literal["stop", "length", "tool_calls"]


class ResponseWriter(Protocol):
    """One endpoint's way to write a generation."""

    def full(self, choices: Sequence[Delta]) -> BaseModel:
        """Return the answer in one body; `choices` are complete."""
        ...

    def chunks(self, delta: Delta) -> Iterable[BaseModel]:
        """Yield the chunks for what one choice gained; none while there is nothing to show."""
        ...

    def last_chunks(self) -> Iterable[BaseModel]:
        """Yield what follows the last delta: one chunk with the usage for a client that asked for it."""
        ...


class _Format:
    """What both endpoints share: the envelope of every body, and which optional fields are wanted."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._fields = generation.fields
        self._num_open = generation.num_choices

    def _envelope(self) -> dict[str, Any]:
        return {
            "id": self._generation.id,
            "created": self._generation.created_s,
            "model": self._fields.model,
            "system_fingerprint": self._generation.model_version,
            **self._mark(),
        }

    def _mark(self) -> dict[str, Any]:
        """Says in every body and every chunk that the output is not exact, where it is not."""
        steps = self._generation.usage.steps
        return {} if steps is None else {"x_speculation": ApproximateSpeculation.of(steps)}

    def _accounts(self) -> dict[str, Any]:
        """Usage and metrics; complete once every choice has ended."""
        usage = self._generation.usage
        return {"usage": usage_object(usage), **self._metrics()}

    def _metrics(self) -> dict[str, Any]:
        metrics = ResponseMetrics.of(self._generation.usage)
        return {} if metrics is None else {"metrics": metrics}

    def _chunk_accounts(self, delta: Delta) -> dict[str, Any]:
        """The last chunk holds the metrics, unless one with the usage follows it."""
        if delta.finish_reason is not None:
            self._num_open -= 1
        if self._fields.has_usage_chunk:
            return self._usage_so_far()
        return self._metrics() if self._num_open == 0 else {}

    def _usage_so_far(self) -> dict[str, Any]:
        """`usage` of a chunk before the last: null, for a client that wants it once; absent for one that does not."""
        if not self._fields.has_usage_chunk:
            return {}
        is_wanted = self._fields.has_running_usage
        return {"usage": usage_object(self._generation.usage) if is_wanted else None}

    def _token_ids(self, delta: Delta) -> dict[str, Any]:
        return {"token_ids": list(delta.token_ids)} if self._fields.return_token_ids else {}

    def _has_news(self, delta: Delta) -> bool:
        """Whether the client sees anything of this delta."""
        has_tokens = bool(delta.token_ids) and (bool(delta.logprobs) or bool(self._fields.return_token_ids))
        return bool(delta.text) or bool(delta.tool_calls) or has_tokens or delta.finish_reason is not None


class CompletionWriter(_Format):
    """`/v1/completions`; whole answers and chunks have the same shape."""

    def full(self, choices: Sequence[Delta]) -> TextCompletion:
        return self._completion([self._choice(choice) for choice in choices], self._accounts())

    def chunks(self, delta: Delta) -> Iterable[TextCompletion]:
        if self._has_news(delta):
            yield self._completion([self._choice(delta)], self._chunk_accounts(delta))

    def last_chunks(self) -> Iterable[TextCompletion]:
        if self._fields.has_usage_chunk:
            yield self._completion([], self._accounts())

    def _completion(self, choices: list[TextChoice], accounts: dict[str, Any]) -> TextCompletion:
        return TextCompletion(object="text_completion", choices=choices, **self._envelope(), **accounts)

    def _choice(self, delta: Delta) -> TextChoice:
        return TextChoice(
            index=delta.index,
            text=delta.text,
            finish_reason=cast(Literal["stop", "length"] | None, _openai_reason(delta.finish_reason)),
            logprobs=completion_logprobs(delta, self._tokenizer),
            **self._token_ids(delta),
        )


class ChatWriter(_Format):
    """`/v1/chat/completions`; the first chunk of each choice names the role."""

    def __init__(self, generation: Generation, tokenizer: Tokenizer) -> None:
        super().__init__(generation, tokenizer)
        self._started: set[int] = set()

    def full(self, choices: Sequence[Delta]) -> Chat:
        return Chat(
            object="chat.completion",
            choices=[self._full_choice(choice) for choice in choices],
            **self._envelope(),
            **self._accounts(),
        )

    def chunks(self, delta: Delta) -> Iterable[ChatChunk]:
        if delta.index not in self._started:
            self._started.add(delta.index)
            yield self._chunk(delta.index, ChoiceDelta(role="assistant", content=""), self._usage_so_far())
        if self._has_news(delta):
            yield self._chunk(
                delta.index,
                chat_delta(delta),
                self._chunk_accounts(delta),
                finish_reason=_openai_reason(delta.finish_reason),
                logprobs=self._chunk_logprobs(delta),
                **self._token_ids(delta),
            )

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
        reason = _openai_reason(delta.finish_reason)
        assert reason is not None
        return ChatChoice(
            index=delta.index,
            message=chat_message(delta),
            finish_reason=reason,
            logprobs=None if content is None else chat_completion.ChoiceLogprobs(content=content, refusal=None),
            **self._token_ids(delta),
        )


def _openai_reason(reason: FinishReason | None) -> OpenAIFinishReason | None:
    assert reason is not FinishReason.ABORT  # a sequence given up by its pair moves on, it does not end
    return None if reason is None else cast(OpenAIFinishReason, reason.value)
