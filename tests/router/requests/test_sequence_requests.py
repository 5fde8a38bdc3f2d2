"""Every field that a client sets reaches the pair."""

from __future__ import annotations

from dataclasses import replace

from protos.messages import GenerateRequest, SamplingParams, SpeculationParams, VerifyMode
from protos.served_model import ModelCard
from router.api_keys import Client, current_client
from router.requests.completion_request import CompletionRequest
from router.requests.sampling_params import GenerateParams, Prompt
from router.requests.sequence_requests import generate_requests
from tests.protos.filled import at_default, filled, names

CARD = ModelCard(
    1000, 500, (0,), "v", 16, max_draft_tokens=4, speculation_methods=("model", "ngram"), has_approximate_steps=True
)
BODY = {
    "n": 2,
    "store": True,
    "seed": 7,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
    "logit_bias": {"3": 1.5},
    "min_tokens": 2,
    "stop_token_ids": [9],
    "stream": True,
    "stream_options": {"include_drafts": True},
    "return_token_sources": True,
    "cache_salt": "salt",
    "priority": 3,
    "timeout_s": 4.5,
    "user": "someone",
    "speculation": {"enabled": False, "num_tokens": 3, "verify": "block", "method": "ngram", "explain": True},
}
# Set on the way to the pair, by `MigratingStreams` and the ingress's own process.
SET_LATER = {"output_token_ids", "is_moved", "is_traced", "feed_address"}


def test_a_request_has_every_field_of_its_body() -> None:
    client = Client("tenant", weight=2.0, is_logged=True)
    token = current_client.set(client)
    try:
        params = GenerateParams(
            "r",
            "m",
            CompletionRequest.model_validate({"model": "m", "prompt": "a", **BODY}),
            (Prompt((1, 2)), Prompt((3, 4))),
            max_tokens=11,
            num_logprobs=6,
            has_echo=True,
            grammar=filled(SamplingParams).grammar,
            prediction_token_ids=(5, 6),
        )
        sent = generate_requests(params, CARD, ((8, 9),))
    finally:
        current_client.reset(token)
    first, last = sent[0], sent[-1]
    assert first == GenerateRequest(
        request_id="r-0",
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(
            seed=7,
            temperature=0.5,
            top_k=5,
            top_p=0.9,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.3,
            logit_bias=((3, 1.5),),
            bad_words=((8, 9),),
            stop_token_ids=first.sampling.stop_token_ids,
            min_tokens=2,
            max_tokens=11,
            num_logprobs=6,
            num_prompt_logprobs=6,
            grammar=filled(SamplingParams).grammar,
        ),
        speculation=SpeculationParams(False, 3, VerifyMode.BLOCK, "ngram", explain=True),
        priority=3,
        timeout_s=4.5,
        cache_salt=client.secret("salt"),
        prediction_token_ids=(5, 6),
        session_id=first.session_id,
        is_seeded=True,
        returns_sources=True,
        returns_drafts=True,
        num_places=4,
        tenant=client.tenant_id,
        weight=2.0,
        model_version="v",
        is_logged=True,
    )
    assert set(first.sampling.stop_token_ids) == {0, 9}
    assert last == replace(
        first, request_id="r-3", prompt_token_ids=(3, 4), sample_index=1, num_places=1, is_admitted=True
    )
    assert at_default(first) & at_default(last) == SET_LATER, "a new field is mapped here, or set later"
    assert not at_default(first.sampling)
    assert at_default(first.speculation) == {"is_approximate", "threshold"}, "which the next test sets"
    assert not SET_LATER - names(GenerateRequest)


def test_approximate_speculation_has_its_threshold() -> None:
    wishes = {"mode": "approximate", "threshold": 5.0}
    body = CompletionRequest.model_validate({"model": "m", "prompt": "a", "speculation": wishes})
    [sent] = generate_requests(GenerateParams("r", "m", body, (Prompt((1,)),), 4), CARD, ())
    assert sent.speculation == SpeculationParams(is_approximate=True, threshold=5.0)


def sent_of(request_id: str = "r", **fields: object) -> GenerateRequest:
    body = CompletionRequest.model_validate({"model": "m", "prompt": "a", **fields})
    [sent] = generate_requests(GenerateParams(request_id, "m", body, (Prompt((1,)),), 4), CARD, ())
    return sent


def test_a_client_decides_if_its_request_is_logged_and_a_tenth_of_the_others_is() -> None:
    token = current_client.set(Client("tenant", is_logged=True))
    try:
        assert all(sent_of(f"r{number}", store=True).is_logged for number in range(20))
        assert not any(sent_of(f"r{number}", store=False).is_logged for number in range(20))
        assert 50 < sum(sent_of(f"r{number}").is_logged for number in range(1000)) < 150
    finally:
        current_client.reset(token)


def test_a_session_is_named_by_its_cache_key_or_else_by_its_user() -> None:
    named = sent_of(prompt_cache_key="a").session_id
    assert named == sent_of(prompt_cache_key="a", user="b").session_id == sent_of(user="a").session_id
    assert len({named, sent_of(user="b").session_id, sent_of().session_id}) == 3
