"""Every field of an answer reaches the client, and every error has one status in each API."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
from google.protobuf.json_format import MessageToDict

from protos import errors, outrider_pb2_grpc
from protos import outrider_pb2 as pb2
from protos.errors import ServingError
from protos.messages import (
    FinishReason,
    PlainReason,
    SpeculationExplanation,
    SpeculationStats,
    StepStats,
    TokenLogprobs,
)
from protos.served_model import CanaryReport, DraftReport
from router.generation.delta import Delta, ToolCallDelta
from router.generation.generation import Usage
from router.generation.generation_service import GenerationService
from router.grpc_api.messages import choice_message, chunk_message, usage_message
from router.openai.draft_admin import drafts_answer
from router.openai.usage import explanation_object, usage_object
from tests.protos.filled import at_default, filled
from tests.router.fixtures.grpc_channel import grpc_channel

STATS = SpeculationStats(40, 22, (8, 6, 8))
STEPS = StepStats(9, 6, 31)
USAGE = Usage(
    prompt_tokens=11,
    completion_tokens=23,
    cached_tokens=5,
    speculation=STATS,
    accepted_prediction_tokens=7,
    rejected_prediction_tokens=3,
    steps=STEPS,
    explanation=SpeculationExplanation({"model": 4}, {PlainReason.LOAD: 2}, ("near",)),
    reasoning_tokens=13,
)
LOGPROBS = (TokenLogprobs(98, -0.5, ((98, -0.5), (99, -1.5))), None)
DELTA = Delta(
    index=2,
    text="ab",
    token_ids=(98, 99),
    logprobs=LOGPROBS,
    text_offsets=(4, 5),
    finish_reason=FinishReason.STOP,
    tool_calls=(ToolCallDelta(1, "c", "f", "{}"),),
    sources=("plain", "bonus"),
    draft_ids=(100,),
    draft_text="c",
    reasoning="hm",
    num_reasoning_tokens=1,
    stop_string="e",
    prompt_logprobs=LOGPROBS,
)


def test_nothing_is_at_its_default_by_accident() -> None:
    assert at_default(USAGE) == at_default(DELTA) == at_default(STEPS) == set()


def test_usage_has_all_its_counts_over_http() -> None:
    assert usage_object(USAGE).model_dump(exclude_none=True) == {
        "prompt_tokens": 11,
        "completion_tokens": 23,
        "total_tokens": 34,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {
            "accepted_prediction_tokens": 7,
            "rejected_prediction_tokens": 3,
            "reasoning_tokens": 13,
            "accepted_draft_tokens": 22,
            "rejected_draft_tokens": 18,
        },
    }
    assert USAGE.explanation is not None
    explained = explanation_object(USAGE.explanation).model_dump()
    assert explained["passes"] == {"model": 4}
    assert explained["plain_passes"] == {"load": 2}
    assert explained["reasons"].keys() == {"load"}
    assert explained["routes"] == ["near"]


def fields_of(message: Any) -> set[str]:
    return {descriptor.name for descriptor, _ in message.ListFields()}


def test_usage_has_all_its_counts_over_grpc() -> None:
    message = usage_message(USAGE)
    assert MessageToDict(message, preserving_proto_field_name=True) == {
        "prompt_tokens": 11,
        "completion_tokens": 23,
        "total_tokens": 34,
        "cached_tokens": 5,
        "accepted_prediction_tokens": 7,
        "rejected_prediction_tokens": 3,
        "speculative_decoding": {
            "mean_acceptance_length": 2.0,
            "draft_acceptance_rate": 0.55,
            "acceptance_histogram": {"0": 8, "1": 6, "2": 8},
            "num_accepted_draft_tokens": 22,
            "num_draft_tokens": 40,
            "num_spec_steps": 22,
        },
        "explanation": {"passes": {"model": 4}, "plain_passes": {"load": 2}},
    }
    assert fields_of(message) == {field.name for field in message.DESCRIPTOR.fields}


def test_a_choice_and_a_chunk_have_all_their_fields_over_grpc() -> None:
    generation: Any = SimpleNamespace(id="i", fields=SimpleNamespace(return_token_ids=True), steps=STEPS)
    logprobs = [
        {
            "token_id": 98,
            "logprob": -0.5,
            "top": [{"token_id": 98, "logprob": -0.5}, {"token_id": 99, "logprob": -1.5}],
        },
        {"token_id": 99},
    ]
    common = {
        "index": 2,
        "text": "ab",
        "token_ids": [98, 99],
        "finish_reason": "stop",
        "logprobs": logprobs,
        "token_sources": ["plain", "bonus"],
        "reasoning": "hm",
    }
    call = {"id": "c", "name": "f", "arguments": "{}"}
    choice, chunk = choice_message(DELTA, generation), chunk_message(DELTA, generation)
    assert MessageToDict(choice, preserving_proto_field_name=True) == common | {"tool_calls": [call]}
    assert MessageToDict(chunk, preserving_proto_field_name=True) == common | {
        "id": "i",
        "tool_calls": [{"index": 1, **call}],
        "drafts": {"token_ids": [100], "text": "c"},
        "x_speculation": {"steps_from_draft": 6, "steps_rejected": 3, "tokens_from_draft": 31},
    }
    assert fields_of(choice) == {field.name for field in choice.DESCRIPTOR.fields}
    assert fields_of(chunk) | {"usage", "receipt"} == {field.name for field in chunk.DESCRIPTOR.fields}


def test_a_draft_has_all_its_fields_and_no_path_for_everyone() -> None:
    report = filled(DraftReport)
    canary = report.canary
    assert isinstance(canary, CanaryReport)
    [answer] = drafts_answer([report])["drafts"]
    assert answer == {
        "name": report.path,
        "method": report.method,
        "digest": report.digest,
        "since": int(report.since_s),
        "is_deployed": report.is_deployed,
        "tuning": report.tuning,
        "replica": report.replica,
        "path": report.path,
        "canary": {
            "name": canary.path,
            "old_name": canary.old_path,
            "outcome": canary.outcome.value,
            "reason": canary.reason,
            "num_pairs": canary.num_pairs,
            "gain": canary.gain,
            "low": canary.low,
            "high": canary.high,
        },
    }


# Status, type and code over HTTP, the type at /v1/messages, and the code over gRPC.
STATUSES: dict[type[ServingError], tuple[int, str, str | None, str, str]] = {
    errors.RequestError: (400, "invalid_request_error", None, "invalid_request_error", "INVALID_ARGUMENT"),
    errors.ContextLengthError: (
        *(400, "invalid_request_error", "context_length_exceeded"),
        *("invalid_request_error", "INVALID_ARGUMENT"),
    ),
    errors.GrammarError: (
        400,
        "invalid_request_error",
        "grammar_dead_end",
        "invalid_request_error",
        "INVALID_ARGUMENT",
    ),
    errors.AuthenticationError: (
        *(401, "authentication_error", "invalid_api_key"),
        *("authentication_error", "UNAUTHENTICATED"),
    ),
    errors.PermissionDeniedError: (403, "permission_error", None, "permission_error", "PERMISSION_DENIED"),
    errors.NotFoundError: (404, "not_found_error", None, "not_found_error", "NOT_FOUND"),
    errors.ModelNotFoundError: (404, "not_found_error", "model_not_found", "not_found_error", "NOT_FOUND"),
    errors.ConflictError: (409, "conflict_error", "conflict", "api_error", "ABORTED"),
    errors.MisdirectedRequestError: (421, "invalid_request_error", None, "api_error", "INVALID_ARGUMENT"),
    errors.RequestTooLargeError: (413, "invalid_request_error", None, "request_too_large", "RESOURCE_EXHAUSTED"),
    errors.RequestTimeoutError: (408, "timeout_error", None, "timeout_error", "DEADLINE_EXCEEDED"),
    errors.RateLimitError: (429, "rate_limit_error", "rate_limit_exceeded", "rate_limit_error", "RESOURCE_EXHAUSTED"),
    errors.OverloadedError: (503, "service_unavailable_error", "overloaded", "overloaded_error", "RESOURCE_EXHAUSTED"),
    errors.UnavailableError: (503, "service_unavailable_error", None, "overloaded_error", "UNAVAILABLE"),
    errors.EngineLostError: (503, "service_unavailable_error", None, "overloaded_error", "UNAVAILABLE"),
    errors.ModelChangedError: (503, "service_unavailable_error", "model_changed", "overloaded_error", "UNAVAILABLE"),
    errors.ShuttingDownError: (503, "service_unavailable_error", None, "overloaded_error", "UNAVAILABLE"),
    errors.DeadlineExceededError: (504, "timeout_error", None, "timeout_error", "DEADLINE_EXCEEDED"),
    errors.EngineError: (500, "server_error", None, "api_error", "INTERNAL"),
    errors.GivenUpError: (500, "server_error", None, "api_error", "INTERNAL"),
    errors.NonFiniteLogitsError: (500, "server_error", "non_finite_logits", "api_error", "INTERNAL"),
}
AGAIN = {errors.RateLimitError, errors.OverloadedError, errors.UnavailableError, errors.EngineLostError} | {
    errors.ModelChangedError
}
FINAL = {errors.DeadlineExceededError, errors.GivenUpError, errors.NonFiniteLogitsError}


def test_every_error_that_a_client_may_meet_is_known_here() -> None:
    kinds = {each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, ServingError)}
    assert kinds - {ServingError, errors.ConfigError} == STATUSES.keys()


@pytest.mark.parametrize("kind", STATUSES, ids=lambda kind: kind.__name__)
async def test_an_error_has_its_status_its_fields_and_its_wait_at_every_endpoint(
    http: httpx.AsyncClient, service: GenerationService, monkeypatch: pytest.MonkeyPatch, kind: type[ServingError]
) -> None:
    status, error_type, code, anthropic_type, grpc_code = STATUSES[kind]

    async def fail(_: object) -> None:
        raise kind("why", param="p")

    monkeypatch.setattr(service, "complete", fail)
    monkeypatch.setattr(service, "chat", fail)
    answer = await http.post("/v1/completions", json={"prompt": "a"})
    wanted = {"message": "why", "type": error_type, "param": "p", "code": code}
    assert (answer.status_code, answer.json()) == (status, {"error": wanted})
    assert answer.headers.get("retry-after") == ("1" if kind in AGAIN else None)
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
    answer = await http.post("/v1/messages", json=body)
    assert (answer.status_code, answer.json()["type"], answer.json()["error"]["type"]) == (
        status,
        "error",
        anthropic_type,
    )
    assert answer.headers.get("retry-after") == ("1" if kind in AGAIN else None)
    assert answer.headers.get("x-should-retry") == ("false" if kind in FINAL else None)
    async with grpc_channel(service) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="why") as caught:
            await outrider_pb2_grpc.GenerationStub(channel).Generate(pb2.GenerateRequest(prompt="a"))
    assert caught.value.code().name == grpc_code
    assert dict(caught.value.trailing_metadata() or ()).get("retry-after") == ("1.0" if kind in AGAIN else None)
