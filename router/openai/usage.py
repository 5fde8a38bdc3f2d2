"""Token counts and speculation figures of a response, in OpenAI's form with our fields beside."""

from __future__ import annotations

from typing import Literal

from openai.types import CompletionUsage
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails
from pydantic import BaseModel

from router.generation.usage import Usage


class SpeculativeDecoding(BaseModel):
    """The figures of speculation for one request; the names are vLLM's, which aiperf reads."""

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: dict[int, int]  # verification passes by number of accepted drafts
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_steps: int


class ResponseMetrics(BaseModel):
    """`metrics` of a response body or of a stream's last chunk."""

    speculative_decoding: SpeculativeDecoding | None = None


class ApproximateSpeculation(BaseModel):
    """`x_speculation`: this output is not the target's alone; absent from an exact output."""

    exact: Literal[False] = False
    steps_from_draft: int
    steps_rejected: int
    tokens_from_draft: int


def usage_object(usage: Usage) -> CompletionUsage:
    """Return `usage`; without a prediction, drafts are reported where OpenAI reports predictions."""
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
