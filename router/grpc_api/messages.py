"""gRPC messages: requests as bodies of the HTTP API, and answers."""

from __future__ import annotations

import json
from collections.abc import Iterable

from google.protobuf.message import Message

from protos import outrider_pb2 as pb2
from protos.client_text import MAX_PARTS, check_parts
from protos.errors import RequestError
from protos.messages import SpeculationStats, TokenLogprobs
from router.generation.delta import Delta, whole_calls
from router.generation.generation import Generation, Usage


def request_fields(request: pb2.GenerateRequest) -> dict[str, object]:
    """Return the fields that the client set, named and shaped as in the JSON body of `/v1/completions`.

    One schema therefore validates both frontends. `prompt_token_ids` becomes `prompt`; with `messages` the
    shape is the body of `/v1/chat/completions`.

    Raises:
        RequestError: both a text and token ids are given, a JSON field is not valid JSON, or there are too many
            entries.
    """
    _check_entries(request)
    fields: dict[str, object] = {}
    for descriptor, value in request.ListFields():
        fields[descriptor.name] = _plain(descriptor.name, value)
    if "include_drafts" in fields:
        fields |= {"stream": True, "stream_options": {"include_drafts": fields.pop("include_drafts")}}
    token_ids = fields.pop("prompt_token_ids", None)
    if token_ids is not None:
        if "prompt" in fields:
            raise RequestError("prompt and prompt_token_ids are alternatives; send one.", param="prompt")
        fields["prompt"] = token_ids
    return _chat_fields(request, fields) if request.messages else fields


def tokenize_fields(request: pb2.TokenizeRequest) -> dict[str, object]:
    """Return the fields that the client set, named and shaped as in the JSON body of `/tokenize`.

    Raises:
        RequestError: a JSON field is not valid JSON, or there are too many entries.
    """
    _check_entries(request)
    fields = {descriptor.name: _plain(descriptor.name, value) for descriptor, value in request.ListFields()}
    return _chat_fields(request, fields) if request.messages else {"prompt": "", **fields}


def _check_entries(request: pb2.GenerateRequest | pb2.TokenizeRequest) -> None:
    """Limit a chat's entries before they are expanded: a two-byte entry costs microseconds."""
    num_entries = len(request.messages) + len(request.tools) + len(request.allowed_tools)
    if num_entries <= MAX_PARTS:
        num_entries += sum(len(message.tool_calls) for message in request.messages)
    if num_entries > MAX_PARTS:
        raise RequestError(
            f"messages and tools have {num_entries} entries in all; send at most {MAX_PARTS}.", param="messages"
        )


def _chat_fields(request: pb2.GenerateRequest | pb2.TokenizeRequest, fields: dict[str, object]) -> dict[str, object]:
    """Return the fields of a chat; its messages and tools are flat in gRPC."""
    fields["messages"] = [_message(message) for message in request.messages]
    if request.tools:
        fields["tools"] = [_tool(tool) for tool in request.tools]
    if allowed := fields.pop("allowed_tools", None):
        assert isinstance(allowed, list)
        named = [{"type": "function", "function": {"name": name}} for name in allowed]
        choice = {"mode": request.tool_choice or "auto", "tools": named}
        fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": choice}
    if "chat_template_kwargs" in fields:
        fields["chat_template_kwargs"] = _json(request.chat_template_kwargs, "chat_template_kwargs")
    if isinstance(request, pb2.GenerateRequest) and request.HasField("logprobs"):
        fields |= {"logprobs": True, "top_logprobs": request.logprobs}
    return fields


def _message(message: pb2.ChatMessage) -> dict[str, object]:
    fields = {descriptor.name: value for descriptor, value in message.ListFields()}
    if message.tool_calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return fields


def _tool(tool: pb2.Tool) -> dict[str, object]:
    function = {descriptor.name: value for descriptor, value in tool.ListFields()}
    if tool.HasField("parameters"):
        function["parameters"] = _json(tool.parameters, f"tools: parameters of {tool.name}")
    return {"type": "function", "function": function}


def _json(text: str, name: str) -> object:
    check_parts(text.encode(), name)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{name} is not JSON: {error}; send the text of an object.", param=name) from None


def _plain(name: str, value: object) -> object:
    if isinstance(value, Message):
        return {descriptor.name: _plain(descriptor.name, item) for descriptor, item in value.ListFields()}
    if name == "prediction":
        return {"type": "content", "content": value}
    if name == "logit_bias":
        assert hasattr(value, "items")
        return {str(token_id): bias for token_id, bias in value.items()}
    return list(value) if isinstance(value, Iterable) and not isinstance(value, str) else value


def logprobs_message(token_id: int, logprobs: TokenLogprobs | None) -> pb2.TokenLogprobs:
    """Convert one position's logprobs; None (a token without a prediction) gives the id alone."""
    if logprobs is None:
        return pb2.TokenLogprobs(token_id=token_id)
    return pb2.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        top=[pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in logprobs.top],
    )


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
    return [logprobs_message(*each) for each in zip(delta.token_ids, delta.logprobs, strict=False)]


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
        accepted_prediction_tokens=usage.accepted_prediction_tokens,
        rejected_prediction_tokens=usage.rejected_prediction_tokens,
    )
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
