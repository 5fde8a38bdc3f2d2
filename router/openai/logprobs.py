"""Log-probabilities in the forms of both endpoints."""

from __future__ import annotations

from typing import Any

from openai.types.chat import ChatCompletionTokenLogprob
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs
from pydantic import BaseModel

from protos.messages import TokenLogprobs
from router.generation.delta import Delta
from router.tokenizer.tokenizer import Tokenizer


class CompletionLogprobs(Logprobs):
    """OpenAI's type, whose servers also send null for a token without a prediction (an echoed prompt's)."""

    token_logprobs: list[float | None] | None = None  # type: ignore[assignment]
    top_logprobs: list[dict[str, float] | None] | None = None  # type: ignore[assignment]


class PromptLogprob(BaseModel):
    """A token at a position of the prompt, as vLLM has it; its rank is None where it is not among the likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str


def completion_logprobs(delta: Delta, tokenizer: Tokenizer) -> CompletionLogprobs | None:
    """Return the logprobs of `/v1/completions`: parallel lists, the alternatives by text. None without logprobs."""
    if not delta.logprobs:
        return None
    return CompletionLogprobs(
        tokens=[tokenizer.token_text(token_id) for token_id in delta.token_ids],
        token_logprobs=[_finite(position.logprob) if position else None for position in delta.logprobs],
        top_logprobs=[_top_by_text(position, tokenizer) if position else None for position in delta.logprobs],
        text_offset=list(delta.text_offsets),
    )


def chat_logprobs(delta: Delta, tokenizer: Tokenizer) -> list[ChatCompletionTokenLogprob] | None:
    """Return the logprobs of `/v1/chat/completions`: one object per token, with its bytes. None without logprobs."""
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


def prompt_logprobs(delta: Delta, num_top: int | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the field `prompt_logprobs` in vLLM's form: by position, the tokens by id. Empty if not asked for."""
    if num_top is None:
        return {}
    positions = [None if each is None else _top_by_id(each, num_top, tokenizer) for each in delta.prompt_logprobs]
    return {"prompt_logprobs": positions}


def _top_by_id(position: TokenLogprobs, num_top: int, tokenizer: Tokenizer) -> dict[int, PromptLogprob]:
    ranks: dict[int, int | None] = {token_id: rank for rank, (token_id, _) in enumerate(position.top, 1)}
    entries = dict([*position.top[:num_top], (position.token_id, position.logprob)])
    return {
        token_id: PromptLogprob(
            logprob=_finite(logprob), rank=ranks.get(token_id), decoded_token=tokenizer.token_text(token_id)
        )
        for token_id, logprob in entries.items()
    }


def _top_by_text(position: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """Return the most likely tokens and the chosen one; of two tokens with the same text the likelier one is shown."""
    top: dict[str, float] = {}
    for token_id, logprob in (*position.top, (position.token_id, position.logprob)):
        top.setdefault(tokenizer.token_text(token_id), _finite(logprob))
    return top


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)  # JSON has no minus infinity; OpenAI's value for "very unlikely"
