"""Protobuf messages of answers."""

from __future__ import annotations

from protos import convert
from protos import outrider_pb2 as pb2
from protos.messages import SpeculationStats
from router.generation.delta import Delta, whole_calls
from router.generation.generation import Generation
from router.generation.usage import Usage


def choice_message(choice: Delta, generation: Generation) -> pb2.Choice:
    """Return the message of a finished choice."""
    assert choice.finish_reason is not None
    return pb2.Choice(
        index=choice.index,
        text=choice.text,
        token_ids=choice.token_ids if generation.fields.return_token_ids else (),
        finish_reason=choice.finish_reason.value,
        logprobs=_logprobs(choice),
        token_sources=choice.sources,
        tool_calls=[
            pb2.ToolCall(id=call.id or "", name=call.name or "", arguments=call.arguments)
            for call in whole_calls(choice.tool_calls)
        ],
        reasoning=choice.reasoning,
    )


def chunk_message(delta: Delta, generation: Generation) -> pb2.GenerateChunk:
    """Return the message of new text and tokens."""
    steps = generation.steps
    return pb2.GenerateChunk(
        id=generation.id,
        index=delta.index,
        text=delta.text,
        token_ids=delta.token_ids if generation.fields.return_token_ids else (),
        finish_reason=delta.finish_reason.value if delta.finish_reason else "",
        logprobs=_logprobs(delta),
        x_speculation=None if steps is None else pb2.ApproximateSpeculation(**steps.figures()),
        token_sources=delta.sources,
        drafts=pb2.Drafts(token_ids=delta.draft_ids, text=delta.draft_text) if delta.draft_ids else None,
        tool_calls=[
            pb2.ToolCallDelta(index=call.index, id=call.id or "", name=call.name or "", arguments=call.arguments)
            for call in delta.tool_calls
        ],
        reasoning=delta.reasoning,
    )


def _logprobs(delta: Delta) -> list[pb2.TokenLogprobs]:
    """Return one message per token, if logprobs are requested."""
    return [convert.logprobs_message(*each) for each in zip(delta.token_ids, delta.logprobs, strict=False)]


def _speculation_message(stats: SpeculationStats) -> pb2.SpeculativeDecoding:
    histogram = {num_accepted: num for num_accepted, num in enumerate(stats.accepted_histogram) if num}
    return pb2.SpeculativeDecoding(**{**stats.figures(), "acceptance_histogram": histogram})


def usage_message(usage: Usage) -> pb2.Usage:
    """Return the token counts and speculation figures."""
    message = pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
    )
    message.accepted_prediction_tokens = usage.prediction_tokens.accepted_tokens
    message.rejected_prediction_tokens = usage.prediction_tokens.rejected_tokens
    if usage.speculation is not None:
        message.speculative_decoding.CopyFrom(_speculation_message(usage.speculation))
    if usage.explanation is not None:
        counts = pb2.SpeculationExplanation(passes=usage.explanation.drafted, plain_passes=usage.explanation.plain)
        message.explanation.CopyFrom(counts)
    return message


def receipt_text(generation: Generation) -> str:
    """Return the receipt as JSON; empty if the client wants none."""
    receipt = generation.receipt
    return "" if receipt is None else receipt.model_dump_json()
