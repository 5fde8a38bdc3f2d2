"""Conversions between the gRPC messages and the project's own plain data."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import Message

from protos import outrider_pb2 as pb2
from protos.errors import RequestError
from protos.messages import TokenLogprobs


def request_fields(request: pb2.GenerateRequest) -> dict[str, object]:
    """Return the fields that the client has set, named and shaped as in the JSON body of `/v1/completions`.

    So one schema validates both frontends. `prompt_token_ids` becomes `prompt`.

    Raises:
        RequestError: there is a text as well.
    """
    fields: dict[str, object] = {}
    for descriptor, value in request.ListFields():
        fields[descriptor.name] = _plain(descriptor.name, value)
    if "include_drafts" in fields:
        fields |= {"stream": True, "stream_options": {"include_drafts": fields.pop("include_drafts")}}
    token_ids = fields.pop("prompt_token_ids", None)
    if token_ids is not None:
        if "prompt" in fields:
            raise RequestError("prompt and prompt_token_ids both say what is continued; send one.", param="prompt")
        fields["prompt"] = token_ids
    return fields


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
    """Convert one position's log-probabilities; None, of a token without a prediction, gives its id alone."""
    if logprobs is None:
        return pb2.TokenLogprobs(token_id=token_id)
    return pb2.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        top=[pb2.TopLogprob(token_id=token_id, logprob=logprob) for token_id, logprob in logprobs.top],
    )
