"""gRPC messages and plain data have the same content."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import Message

from protos import outrider_pb2 as pb2
from protos.errors import RequestError
from protos.messages import SpeculationStats, TokenLogprobs
from router.grpc_api import messages


def test_only_set_fields_are_converted() -> None:
    assert messages.request_fields(pb2.GenerateRequest(model="m")) == {"model": "m"}
    request = pb2.GenerateRequest(model="m", prompt="", temperature=0, n=1, echo=False)
    assert messages.request_fields(request) == {"model": "m", "prompt": "", "temperature": 0.0, "n": 1, "echo": False}


def test_fields_have_the_shape_of_the_json_body() -> None:
    request = pb2.GenerateRequest(
        prompt_token_ids=[1, 2],
        stop=["a"],
        logit_bias={5: -1.5},
        speculation=pb2.Speculation(enabled=False, verify="coupled"),
    )
    assert messages.request_fields(request) == {
        "prompt": [1, 2],
        "stop": ["a"],
        "logit_bias": {"5": -1.5},
        "speculation": {"enabled": False, "verify": "coupled"},
    }


def test_every_request_field_is_one_of_the_http_body() -> None:
    from router.requests.chat_request import ChatCompletionRequest
    from router.requests.completion_request import CompletionRequest

    names = {field.name for field in pb2.GenerateRequest.DESCRIPTOR.fields}
    names -= {"prompt_token_ids", "include_drafts"}  # `prompt` and `stream_options` have them there
    names -= {"allowed_tools"}  # part of `tool_choice` there
    assert names <= {*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields}


def set_all(message: Message) -> None:
    """Set every field of a message and of its submessages, which do not recurse."""
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value[7] = 1.5
        elif field.message_type is not None:
            set_all(value.add() if field.is_repeated else value)
        elif field.is_repeated:
            value.append("text" if field.cpp_type == field.CPPTYPE_STRING else 5)
        else:
            values = {field.CPPTYPE_STRING: '{"a": 1}', field.CPPTYPE_BOOL: True}
            setattr(message, field.name, values.get(field.cpp_type, 5))


def test_every_field_that_is_set_is_converted() -> None:
    request = pb2.GenerateRequest()
    set_all(request)
    every = {field.name for field in pb2.GenerateRequest.DESCRIPTOR.fields}
    chat = set(every) - {"prompt", "prompt_token_ids", "include_drafts", "allowed_tools"}
    request.ClearField("prompt")
    fields = messages.request_fields(request)
    assert chat | {"prompt", "stream", "stream_options", "top_logprobs"} == set(fields)
    lists: dict[str, Any] = fields
    [message], [tool] = lists["messages"], lists["tools"]
    assert set(message) == {field.name for field in pb2.ChatMessage.DESCRIPTOR.fields}
    assert set(tool["function"]) == {field.name for field in pb2.Tool.DESCRIPTOR.fields}
    assert set(lists["speculation"]) == {field.name for field in pb2.Speculation.DESCRIPTOR.fields}


@pytest.mark.parametrize(
    "request_",
    [
        pb2.GenerateRequest(messages=[pb2.ChatMessage()] * 65_537),
        pb2.GenerateRequest(messages=[pb2.ChatMessage()], tools=[pb2.Tool()] * 65_536),
        pb2.GenerateRequest(messages=[pb2.ChatMessage()], allowed_tools=["a"] * 65_536),
        pb2.GenerateRequest(messages=[pb2.ChatMessage(tool_calls=[pb2.ToolCall()] * 32_768)] * 2),
    ],
)
def test_entries_are_counted_before_they_are_expanded(
    request_: pb2.GenerateRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of 8 MiB has millions of them: ten seconds and more of processor time."""
    monkeypatch.setattr(messages, "_plain", lambda name, value: pytest.fail("expanded"))
    with pytest.raises(RequestError, match=r"655\d\d entries in all; send at most 65536"):
        messages.request_fields(request_)


def test_json_in_a_text_is_counted_before_it_is_read() -> None:
    lists = '{"a": [' + "[]," * 400_000 + "0]}"
    with pytest.raises(RequestError, match="chat_template_kwargs holds 400004 lists"):
        messages.request_fields(pb2.GenerateRequest(messages=[pb2.ChatMessage()], chat_template_kwargs=lists))


def test_logprobs_keep_their_order() -> None:
    message = messages.logprobs_message(3, TokenLogprobs(3, -0.5, ((3, -0.5), (4, -1.0))))
    assert (message.token_id, message.logprob) == (3, -0.5)
    assert [(top.token_id, top.logprob) for top in message.top] == [(3, -0.5), (4, -1.0)]


def test_speculation_stats_become_vllms_figures() -> None:
    assert SpeculationStats(8, 5, (1, 0, 1, 1)).figures() == {
        "mean_acceptance_length": 1 + 5 / 3,
        "draft_acceptance_rate": 5 / 8,
        "acceptance_histogram": [1, 0, 1, 1],
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 8,
        "num_spec_steps": 3,
    }
    assert SpeculationStats().figures()["mean_acceptance_length"] == 0
