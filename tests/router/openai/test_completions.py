"""The completions endpoint as the real OpenAI client sees it."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator
from dataclasses import replace

import httpx
import openai
import pytest
from openai.types import Completion

from protos.errors import (
    DeadlineExceededError,
    EngineError,
    EngineLostError,
    NonFiniteLogitsError,
    OverloadedError,
    RequestError,
    ServingError,
    UnavailableError,
)
from protos.messages import (
    FinishReason,
    GenerateRequest,
    SamplingDefaults,
    SpeculationMethod,
    TokenChunk,
    VerifyMode,
)
from router.backend import migration
from router.generation.generation_service import GenerationService
from router.openai.api import build_app
from router.tokenizer import Tokenizer
from tests.router.fixtures.fake_backend import FakeBackend, say
from tests.router.fixtures.key_files import api_keys


def ids(text: str) -> list[int]:
    return [byte + 1 for byte in text.encode()]


async def test_a_text_prompt_is_continued(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="fake", prompt="abc", max_tokens=5)
    assert answer.choices[0].text == "defgh"
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion"
    assert answer.system_fingerprint == "v1"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (3, 5, 8)


async def test_the_default_is_sixteen_tokens(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="fake", prompt="a")
    assert answer.usage.completion_tokens == 16


async def test_token_ids_are_taken_and_given_back(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="fake", prompt=ids("abc"), max_tokens=2, extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].text == "de"
    assert answer.choices[0].token_ids == ids("de")


async def test_a_stream_has_the_ids_of_each_choice_s_prompt_once(lenient_client: openai.AsyncOpenAI) -> None:
    body = {"model": "fake", "max_tokens": 5, "n": 2, "stream": True, "extra_body": {"return_token_ids": True}}
    found: dict[int, list[list[int]]] = {}
    async for chunk in await lenient_client.completions.create(prompt=["abc", "x"], **body):
        for choice in chunk.choices:
            found.setdefault(choice.index, []).append(choice.model_dump().get("prompt_token_ids"))
    assert {index: given[0] for index, given in found.items()} == {
        0: ids("abc"),
        1: ids("abc"),
        2: ids("x"),
        3: ids("x"),
    }
    assert all(not any(given[1:]) for given in found.values())
    chat = [{"role": "user", "content": "hi"}]
    chunks = [chunk async for chunk in await lenient_client.chat.completions.create(messages=chat, **body)]
    given = [chunk.model_dump().get("prompt_token_ids") for chunk in chunks]
    assert given[0] == ids("[user]hi[assistant]")
    assert not any(given[1:])


@pytest.mark.parametrize("prompts", [["abc", "x"], [ids("abc"), ids("x")]])
async def test_each_prompt_has_n_choices_in_order(client: openai.AsyncOpenAI, prompts: list) -> None:
    answer = await client.completions.create(model="fake", prompt=prompts, max_tokens=2, n=2)
    assert [choice.text for choice in answer.choices] == ["de", "ef", "yz", "z{"]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage.prompt_tokens == 4
    assert answer.usage.completion_tokens == 8
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


async def test_usage_and_metrics_tell_what_speculation_did(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="fake", prompt="abc", max_tokens=6)
    details = answer.usage.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (0, 0)
    assert (details.accepted_draft_tokens, details.rejected_draft_tokens) == (3, 3)
    assert answer.metrics["speculative_decoding"] == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [0, 3],
        "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 6,
        "num_spec_steps": 3,
    }


async def test_echo_puts_the_prompt_before_the_answer(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="fake", prompt="abc", max_tokens=2, echo=True)
    assert answer.choices[0].text == "abcde"


async def test_echo_with_logprobs_scores_the_prompt(lenient_client: openai.AsyncOpenAI) -> None:
    answer = await lenient_client.completions.create(model="fake", prompt="abc", max_tokens=2, echo=True, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", "b", "c", "d", "e"]
    assert logprobs.token_logprobs == [None, -0.25, -0.25, -0.5, -0.5]
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert logprobs.top_logprobs == [None, {"b": -0.25}, {"c": -0.25}, {"d": -0.5}, {"e": -0.5}]


async def test_the_echo_of_a_prompt_that_was_cut_is_what_was_read(lenient_client: openai.AsyncOpenAI) -> None:
    cut = {"truncate_prompt_tokens": 2}
    answer = await lenient_client.completions.create(
        model="fake", prompt="abc", max_tokens=1, echo=True, logprobs=0, extra_body=cut
    )
    assert answer.choices[0].text == "bcd"
    assert answer.choices[0].logprobs.tokens == ["b", "c", "d"]
    assert answer.choices[0].logprobs.text_offset == [0, 1, 2]


@pytest.mark.parametrize(
    ("prompt", "is_skipping", "text", "offsets"),
    [
        ("<|end|>ab", True, "<|end|>ab", [0, 7, 8]),
        ("<|end|>ab", False, "<|end|>ab", [0, 7, 8]),
        ([0, *ids("ab")], True, "ab", [0, 0, 1]),
        ([0, *ids("ab")], False, "<|end|>ab", [0, 7, 8]),
    ],
)
async def test_offsets_of_an_echo_are_places_in_its_text(
    lenient_client: openai.AsyncOpenAI, prompt: str | list[int], is_skipping: bool, text: str, offsets: list[int]
) -> None:
    shown = {"skip_special_tokens": is_skipping}
    answer = await lenient_client.completions.create(
        model="fake", prompt=prompt, max_tokens=1, echo=True, logprobs=0, extra_body=shown
    )
    assert answer.choices[0].text == text + "c"
    assert answer.choices[0].logprobs.text_offset == [*offsets, len(text)]


async def test_max_tokens_0_with_echo_scores_the_prompt_alone(lenient_client: openai.AsyncOpenAI) -> None:
    answer = await lenient_client.completions.create(model="fake", prompt="abc", max_tokens=0, echo=True, logprobs=0)
    assert answer.choices[0].text == "abc"
    assert answer.choices[0].logprobs.token_logprobs == [None, -0.25, -0.25]
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 0


async def test_logprobs_are_parallel_lists(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="fake", prompt="a", max_tokens=3, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["b", "c", "d"]
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs[0] == {"b": -0.5, "c": -1.5}


async def test_a_stop_string_ends_the_text_before_it(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    answer = await client.completions.create(
        model="fake", prompt="a", max_tokens=20, stop=["xyz", "fg"], extra_body={"return_token_ids": True}
    )
    assert answer.choices[0].text == "bcde"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].token_ids == ids("bcdefg")
    assert answer.usage.completion_tokens == 6
    assert backend.num_running == 0


async def test_an_end_token_is_counted_but_not_shown(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    backend.next_token = say(*ids("hi"), 0)
    answer = await client.completions.create(model="fake", prompt="a")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("hi", "stop")
    assert answer.usage.completion_tokens == 3


async def test_a_stream_is_the_whole_answer_in_pieces(lenient_client: openai.AsyncOpenAI) -> None:
    stream = await lenient_client.completions.create(
        model="fake", prompt="abc", max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = [chunk async for chunk in stream]
    assert [chunk.choices[0].text for chunk in chunks] == ["de", "fg", "h", ""]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "length"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == 5
    assert last.metrics["speculative_decoding"]["num_spec_steps"] == 3
    Completion.model_validate(chunks[-1].model_dump(), strict=True)


async def test_a_stream_may_tell_the_usage_so_far(lenient_client: openai.AsyncOpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = await lenient_client.completions.create(
        model="fake", prompt="abc", max_tokens=5, stream=True, stream_options=options
    )
    *chunks, last = [chunk async for chunk in stream]
    assert [chunk.usage.completion_tokens for chunk in chunks] == [2, 4, 5, 5]
    assert [chunk.usage.total_tokens for chunk in chunks] == [5, 7, 8, 8]
    assert last.usage == chunks[-1].usage


async def test_a_stream_without_usage_ends_with_the_metrics(lenient_client: openai.AsyncOpenAI) -> None:
    stream = await lenient_client.completions.create(model="fake", prompt="abc", max_tokens=5, stream=True)
    chunks = [chunk async for chunk in stream]
    assert chunks[-1].metrics["speculative_decoding"]["num_draft_tokens"] == 5
    assert all(chunk.usage is None for chunk in chunks)


async def test_several_choices_stream_together(lenient_client: openai.AsyncOpenAI) -> None:
    stream = await lenient_client.completions.create(model="fake", prompt=["abc", "x"], max_tokens=5, n=2, stream=True)
    texts = ["", "", "", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == ["defgh", "efghi", "yz{|}", "z{|}~"]


async def test_text_never_leaks_past_a_stop_string(lenient_client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    backend.tokens_per_step = 1
    stream = await lenient_client.completions.create(model="fake", prompt="a", max_tokens=20, stop="efg", stream=True)
    pieces = [chunk.choices[0].text async for chunk in stream]
    assert "".join(pieces) == "bcd"
    assert all(set(piece) <= set("bcd") for piece in pieces)
    assert backend.num_running == 0


async def test_an_error_before_the_first_token_has_its_own_status(
    lenient_client: openai.AsyncOpenAI, backend: FakeBackend
) -> None:
    backend.failures = [OverloadedError("full", retry_after_s=2.2)]
    with pytest.raises(openai.InternalServerError) as caught:
        await lenient_client.completions.create(model="fake", prompt="a", stream=True)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "3"
    assert (caught.value.type, caught.value.code) == ("service_unavailable_error", "overloaded")


async def test_a_full_pair_is_not_asked_again_at_once_and_the_proxy_hears_of_it(
    service: GenerationService, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_FIRST_REFUSAL_S", "_LONGEST_REFUSAL_S", "_STREAK_S"):
        monkeypatch.setattr(migration, name, 100.0)
    backend.failures = [OverloadedError("full") for _ in range(4)]
    app = build_app(service, api_keys("a tenant=one", "b tenant=two"))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://outrider") as http:
        answers = [
            await http.post("/v1/completions", json={"model": "fake", "prompt": "a"}, headers={"x-api-key": key})
            for key in "aaaaab"
        ]
    assert [answer.status_code for answer in answers] == [503] * 5 + [200]
    assert ["x-outrider-full" in answer.headers for answer in answers] == [True] * 5 + [False]


async def test_a_request_of_many_choices_is_refused_before_any_of_them_runs(
    lenient_client: openai.AsyncOpenAI, backend: FakeBackend
) -> None:
    backend.failures = [OverloadedError("full")]
    with pytest.raises(openai.InternalServerError):
        await lenient_client.completions.create(model="fake", prompt=["a", "b"], n=4)
    assert [(request.num_places, request.is_admitted) for request in backend.requests] == [(8, False)]
    answer = await lenient_client.completions.create(model="fake", prompt=["a", "b"], n=4, max_tokens=2)
    assert len(answer.choices) == 8
    assert [request.is_admitted for request in backend.requests[1:]] == [False] + [True] * 7


@pytest.mark.parametrize(
    ("failure", "num_tried"),
    [(DeadlineExceededError("late"), 1), (NonFiniteLogitsError("nan"), 1), (EngineLostError("gone"), 3)],
)
async def test_clients_do_not_repeat_a_request_that_would_fail_again(
    lenient_client: openai.AsyncOpenAI,
    backend: FakeBackend,
    monkeypatch: pytest.MonkeyPatch,
    failure: ServingError,
    num_tried: int,
) -> None:
    monkeypatch.setattr(migration, "_APART_S", 0.0)
    backend.failures = [failure] * 9
    with pytest.raises(openai.InternalServerError):
        await lenient_client.with_options(max_retries=2).completions.create(model="fake", prompt="a")
    assert len(backend.requests) == num_tried


async def test_an_error_in_the_stream_is_its_last_event(
    lenient_client: openai.AsyncOpenAI, backend: FakeBackend
) -> None:
    backend.failures, backend.fail_after = [EngineError("the engine broke")], 2
    stream = await lenient_client.completions.create(model="fake", prompt="a", stream=True)
    assert (await anext(stream)).choices[0].text == "bc"
    with pytest.raises(openai.APIError, match="the engine broke"):
        await anext(stream)


async def test_logits_that_are_not_finite_are_an_error_with_a_code_of_its_own(
    lenient_client: openai.AsyncOpenAI, backend: FakeBackend
) -> None:
    async def overflow(request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        yield TokenChunk(request.request_id, (98,))
        yield TokenChunk(request.request_id, (), finish_reason=FinishReason.NON_FINITE, offset=1, error="too large")

    backend._run = overflow  # type: ignore[method-assign]
    with pytest.raises(openai.InternalServerError) as failure:
        await lenient_client.completions.create(model="fake", prompt="a")
    assert failure.value.status_code == 500
    assert failure.value.body == {
        "message": "too large",
        "type": "server_error",
        "param": None,
        "code": "non_finite_logits",
    }
    stream = await lenient_client.completions.create(model="fake", prompt="a", stream=True)
    assert (await anext(stream)).choices[0].text
    with pytest.raises(openai.APIError, match="too large"):
        await anext(stream)


async def test_a_lost_pair_is_not_seen_by_the_client(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    backend.failures, backend.fail_after = [UnavailableError("gone"), UnavailableError("gone")], 2
    answer = await client.completions.create(model="fake", prompt="abc", max_tokens=8, seed=3)
    assert answer.choices[0].text == "defghijk"
    assert [request.output_token_ids for request in backend.requests] == [(), tuple(ids("de")), tuple(ids("defg"))]
    assert {(request.sampling.seed, request.is_seeded) for request in backend.requests} == {(3, True)}


async def test_every_parameter_reaches_the_engine(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    await client.completions.create(
        model="fake",
        prompt="abc",
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        logit_bias={"7": 3, "5": -100},
        seed=-4,
        logprobs=2,
        user="me",
        extra_body={
            "top_k": 4,
            "min_p": 0.05,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "stop_token_ids": [9],
            "bad_words": ["no"],
            "cache_salt": "tenant",
            "prompt_cache_key": "conversation 7",
            "priority": -3,
            "timeout_s": 30.0,
            "speculation": {"enabled": True, "num_tokens": 2, "verify": "rejection", "method": "ngram"},
        },
    )
    [request] = backend.requests
    sampling = request.sampling
    assert (sampling.seed, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (
        -4,
        0.5,
        4,
        0.9,
        0.05,
    )
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.1, 0.1, 0.2)
    assert sampling.logit_bias == ((5, -100.0), (7, 3.0))
    assert sampling.bad_words == (tuple(ids("no")), tuple(ids(" no")))
    assert sampling.stop_token_ids == (0, 9)
    assert (sampling.min_tokens, sampling.max_tokens, sampling.num_logprobs) == (2, 9, 2)
    assert (request.speculation.num_tokens, request.speculation.verify) == (2, VerifyMode.REJECTION)
    assert request.speculation.method == SpeculationMethod.NGRAM
    assert (request.cache_salt, request.priority) == ("tenant", -3)
    assert request.session_id == hashlib.sha256(b"conversation 7").hexdigest()[:32]
    assert 29 < request.timeout_s <= 30


async def test_bad_words_are_read_once_for_all_prompts(
    client: openai.AsyncOpenAI, backend: FakeBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand words and a hundred prompts: read for each prompt, the words took a minute of the event loop."""
    texts, encode = [], Tokenizer.encode
    monkeypatch.setattr(Tokenizer, "encode", lambda self, text, **how: texts.append(text) or encode(self, text, **how))
    await client.completions.create(model="fake", prompt=["a", "b", "c"], extra_body={"bad_words": ["no"]})
    assert texts == ["a", "b", "c", "no", " no"]
    assert {request.sampling.bad_words for request in backend.requests} == {(tuple(ids("no")), tuple(ids(" no")))}


async def test_parameters_left_out_take_the_checkpoint_s_defaults(
    client: openai.AsyncOpenAI, backend: FakeBackend
) -> None:
    backend.card = replace(backend.card, sampling_defaults=SamplingDefaults(0.6, 20, 0.9, 0.1, 1.2))
    await client.completions.create(model="fake", prompt="a")
    await client.completions.create(model="fake", prompt="a", temperature=0, extra_body={"top_k": 0, "min_p": 0})
    sampled = [request.sampling for request in backend.requests]
    assert [(s.temperature, s.top_k, s.top_p, s.min_p, s.repetition_penalty) for s in sampled] == [
        (0.6, 20, 0.9, 0.1, 1.2),
        (0.0, 0, 0.9, 0.0, 1.2),
    ]


async def test_end_tokens_can_be_ignored(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    await client.completions.create(model="fake", prompt="a", extra_body={"ignore_eos": True, "top_k": -1})
    assert backend.requests[0].sampling.stop_token_ids == ()
    assert backend.requests[0].sampling.top_k == 0


async def test_an_absent_seed_is_drawn_anew(client: openai.AsyncOpenAI, backend: FakeBackend) -> None:
    for _ in range(2):
        await client.completions.create(model="fake", prompt="a", n=2)
    first, second, third, _ = [request.sampling.seed for request in backend.requests]
    assert not any(request.is_seeded for request in backend.requests)
    assert first == second != third


async def test_where_one_of_several_choices_fails_none_of_the_others_goes_on(
    http: httpx.AsyncClient, backend: FakeBackend
) -> None:
    for is_stream in (False, True):
        backend.failures, backend.fail_after, backend.step_s = [RequestError("no more", param="prompt")], 4, 0.001
        body = {"prompt": ["abc", "abcd"], "n": 3, "max_tokens": 100, "stream": is_stream}
        answer = await http.post("/v1/completions", json=body)
        assert "no more" in answer.text
        await backend.until_idle()
        assert backend.num_running == 0
