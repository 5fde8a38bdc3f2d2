"""Token counts and speculation figures of a response, in OpenAI's form with our fields added."""

from __future__ import annotations

from typing import Any, Literal

from openai.types import CompletionUsage
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails
from pydantic import BaseModel

from protos.messages import PlainReason, SpeculationExplanation
from router.generation.usage import Usage

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
    drafts: dict[str, Any] = {  # added to OpenAI's fields; its types accept extra ones
        "accepted_draft_tokens": usage.draft_tokens.accepted_tokens,
        "rejected_draft_tokens": usage.draft_tokens.rejected_tokens,
    }
    return CompletionUsage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=usage.prediction_tokens.accepted_tokens,
            rejected_prediction_tokens=usage.prediction_tokens.rejected_tokens,
            reasoning_tokens=usage.reasoning_tokens,
            **drafts,
        ),
    )
