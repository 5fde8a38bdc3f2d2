"""Answers of `/v1/completions`: OpenAI's types with our fields added, and their writer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal, cast

from openai.types import Completion, CompletionChoice

from router.generation.delta import Delta, join_deltas
from router.generation.receipts import Receipt
from router.openai.logprobs import CompletionLogprobs, PromptLogprob, completion_logprobs, prompt_logprobs
from router.openai.response_writer import ResponseWriter, openai_reason
from router.openai.usage import ApproximateSpeculation, DraftEvent, ResponseMetrics


class TextChoice(CompletionChoice):
    """A choice of `/v1/completions`; in a stream the finish reason is null until the end, as OpenAI sends it."""

    finish_reason: Literal["stop", "length", "content_filter"] | None = None  # type: ignore[assignment]
    logprobs: CompletionLogprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: tuple[int, ...] | None = None  # not in a stream
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

    def full(self, gained: Sequence[Sequence[Delta]]) -> TextCompletion:
        choices = [join_deltas(deltas) for deltas in gained]
        written = [self._choice(choice, **self._prompt_token_ids(choice.index)) for choice in choices]
        return self._completion(written, self._accounts())

    def _chunks(self, piece: Delta) -> Iterable[TextCompletion]:
        if self._has_news(piece):
            yield self._completion([self._choice(piece)], self._chunk_accounts(piece))
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
