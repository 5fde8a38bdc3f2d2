"""gRPC messages and plain data say the same."""

from __future__ import annotations

from protos import convert
from protos import outrider_pb2 as pb2
from protos.messages import SpeculationStats, TokenLogprobs


def test_only_set_fields_are_converted() -> None:
    assert convert.request_fields(pb2.GenerateRequest(model="m")) == {"model": "m"}
    request = pb2.GenerateRequest(model="m", prompt="", temperature=0, n=1, echo=False)
    assert convert.request_fields(request) == {"model": "m", "prompt": "", "temperature": 0.0, "n": 1, "echo": False}


def test_fields_have_the_shape_of_the_json_body() -> None:
    request = pb2.GenerateRequest(
        prompt_token_ids=[1, 2],
        stop=["a"],
        logit_bias={5: -1.5},
        speculation=pb2.Speculation(enabled=False, verify="coupled"),
    )
    assert convert.request_fields(request) == {
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


def test_logprobs_keep_their_order() -> None:
    message = convert.logprobs_message(3, TokenLogprobs(3, -0.5, ((3, -0.5), (4, -1.0))))
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
