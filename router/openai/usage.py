"""Token counts, figures of speculation and log-probabilities of a response, in OpenAI's form with our fields added."""

from __future__ import annotations

from typing import Any, Literal

from openai.types import CompletionUsage
from openai.types.chat import ChatCompletionTokenLogprob
from openai.types.chat.chat_completion_token_logprob import TopLogprob
from openai.types.completion_choice import Logprobs
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails
from pydantic import BaseModel

from protos.messages import PlainReason, SpeculationExplanation, SpeculationStats, TokenLogprobs
from router.generation.delta import Delta
from router.generation.generation import Usage
from router.tokenizer import Tokenizer

PLAIN_REASONS = {
    PlainReason.OFF: "This request, or the deployment, drafts nothing.",
    PlainReason.PROMPT: "The pass that ends the prefill gives the first token.",
    PlainReason.LAST_TOKEN: "One token was left to generate.",
    PlainReason.CLASS_OFF: "Drafts were measured to gain such requests too little at this load, and are off.",
    PlainReason.LOAD: "No draft pays at this load, or the pass measured decoding without drafts.",
    PlainReason.NO_ROOM: "The pass or the KV cache was full.",
    PlainReason.DRAFT_AWAY: "The draft was away or late.",
    PlainReason.NO_MATCH: "No earlier text predicts the continuation.",
    PlainReason.CONSTRAINT: "The response format forbade the first draft token.",
    PlainReason.INVALID: "The draft was not a token of the target.",
}


class SpeculativeDecoding(BaseModel):
    """The figures of speculation for one request; the names are vLLM's, which aiperf reads."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # verification passes that accepted 0, 1, ... drafts
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_steps: int


class Explanation(BaseModel):
    """`metrics.speculation_explanation`: passes with drafts by method, those without by reason, and the reasons."""

    passes: dict[str, int]
    plain_passes: dict[str, int]
    reasons: dict[str, str]
    routes: list[str] | None = None  # the router's reasons, for admins


class DraftEvent(BaseModel):
    """An entry of `x_drafts`: the drafts under verification after the current text of choice `index`."""

    index: int
    token_ids: list[int]
    text: str


class ResponseMetrics(BaseModel):
    """`metrics` of a response body or of a stream's last chunk."""

    speculative_decoding: SpeculativeDecoding | None = None
    speculation_explanation: Explanation | None = None


class ApproximateSpeculation(BaseModel):
    """`x_speculation`: this output is not the target's alone; absent from an exact output."""

    exact: Literal[False] = False
    steps_from_draft: int
    steps_rejected: int
    tokens_from_draft: int


def explanation_object(explanation: SpeculationExplanation) -> Explanation:
    """Return the counts, with a sentence for each reason among them."""
    reasons = {reason: PLAIN_REASONS[PlainReason(reason)] for reason in explanation.plain}
    made = Explanation(passes=explanation.drafted, plain_passes=explanation.plain, reasons=reasons)
    if explanation.routes:
        made.routes = list(explanation.routes)
    return made


def usage_object(usage: Usage) -> CompletionUsage:
    """Return OpenAI's `usage` with our counts of draft tokens; prediction tokens count the client's prediction."""
    stats = usage.speculation or SpeculationStats()
    drafts: dict[str, Any] = {  # added to OpenAI's fields; its types accept extra ones
        "accepted_draft_tokens": stats.num_accepted_tokens,
        "rejected_draft_tokens": stats.num_draft_tokens - stats.num_accepted_tokens,
    }
    return CompletionUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=usage.accepted_prediction_tokens,
            rejected_prediction_tokens=usage.rejected_prediction_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            **drafts,
        ),
    )


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
