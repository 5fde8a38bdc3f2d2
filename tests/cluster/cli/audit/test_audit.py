"""The audit finds planted faults of a server with a known distribution, and nothing at one without a fault."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from cluster.cli.audit.audit import CHECKS, Check, Result, connect, corrected, run_audit
from cluster.cli.audit.client import RequestBudget, seeds_from
from cluster.cli.audit.trial import CheckVerdict
from protos.errors import ConfigError
from tests.cluster.cli.audit import toy_server
from tests.cluster.cli.audit.toy_server import MODEL, VOCABULARY, ToyServer, softmax, tokens_of

# Each fault with the check that must find it. A whole audit of the toy takes some 2,600 requests.
FOUND_BY = {
    "shared noise": "temperature-1",
    "shared noise of later tokens": "later-tokens",
    "argmax": "temperature-1",
    "ignored temperature": "temperature-0.7",
    "ignored top_p": "top-p",
    "ignored top_k": "top-k",
    "ignored min_p": "min-p",
    "ignored logit_bias": "logit-bias",
    "ignored presence_penalty": "presence",
    "ignored frequency_penalty": "frequency",
    "ignored min_tokens": "min-tokens",
    "ignored stop": "stops",
    "temperature ignored with drafts": "later-parameters",
    "top_p ignored with drafts": "later-parameters",
    "top_k ignored with drafts": "later-parameters",
    "min_p ignored with drafts": "later-parameters",
    "logit_bias ignored with drafts": "later-parameters",
    "presence_penalty ignored with drafts": "presence",
    "frequency_penalty ignored with drafts": "frequency",
    "penalties by step": "frequency",
    "bonus from the wrong row": "later-tokens",
    "bonus and its logprobs from the wrong row": "prefixes",
    "stale drafts of cached prefixes": "cache",
    "JSON cut by a stop": "json",
    "cut tool calls": "tools",
    "company": "company",
    "miscounted tokens": "usage",
    "a token too many": "max-tokens",
    "other texts without drafts": "two-greedy",
}


def checks_of(*names: str) -> list[Check]:
    return [check for check in CHECKS if check.name in names]


async def audit(
    app: Starlette,
    checks: Sequence[Check],
    *,
    start: int = 1,
    max_requests: int = 20_000,
    other: Starlette | None = None,
) -> dict[str, Result]:
    budget = RequestBudget(max_requests, time.monotonic() + 170)
    server = await connect("http://toy/v1", "key", None, budget, httpx.ASGITransport(app))
    second = await connect("http://two/v1", "key", None, budget, httpx.ASGITransport(other)) if other else None
    server.seeds = seeds_from(start)
    results = await run_audit(server, second, checks, lambda name, result: None)
    return {result.name: result for result in results}


@pytest.mark.parametrize(("fault", "name"), FOUND_BY.items(), ids=FOUND_BY)
async def test_a_planted_fault_is_found(fault: str, name: str):
    result = (await audit(ToyServer(fault).app, checks_of(name)))[name]
    assert result.verdict is CheckVerdict.FOUND, result.sentence
    assert result.corrected_p <= 1e-4
    assert result.finding is not None
    assert result.finding.request.body["model"] == MODEL


async def test_a_server_that_does_as_it_reports_passes_every_check():
    results = await audit(ToyServer().app, CHECKS, start=77)
    assert {name: result.sentence for name, result in results.items() if result.verdict is not CheckVerdict.HOLDS} == {}
    assert results["temperature-1"].num_draws > 10_000  # the stated power for 60% served at 63%


async def test_a_server_with_steep_distributions_is_no_fault(monkeypatch: pytest.MonkeyPatch):
    """All tokens but two have chances that round to 0."""
    tail = [-25.0 - rank for rank in range(len(VOCABULARY) - 2)]
    monkeypatch.setattr(toy_server, "logits_after", lambda pair: (0.0, -1.0, *tail))
    monkeypatch.setattr(toy_server, "plain_probs", lambda pair: tuple(softmax((0.0, -1.0, *tail))))
    monkeypatch.setattr(toy_server, "top_of", toy_server.top_of.__wrapped__)
    results = await audit(ToyServer().app, checks_of("top-p", "top-k", "min-p"))
    assert {result.verdict for result in results.values()} <= {CheckVerdict.HOLDS, CheckVerdict.CANNOT_TELL}


async def test_a_servers_own_penalty_is_switched_off():
    """llama.cpp's server applies the checkpoint's, unless the request has `repeat_penalty: 1.0`."""
    toy = ToyServer()

    async def complete(request: Request) -> Response:
        body = await request.json()
        penalty = {} if body.get("repeat_penalty") == 1.0 else {"presence_penalty": 1.0}
        return toy.answer({**body, **penalty, "busy": 1}, tokens_of(body["prompt"]))

    results = await audit(app_of(complete), checks_of("second-ask", "later-tokens"))
    assert {result.verdict for result in results.values()} == {CheckVerdict.HOLDS}


async def test_penalties_may_count_the_prompt(monkeypatch: pytest.MonkeyPatch):
    """llama.cpp counts its tokens. Here "w1" is a part of each word, and no token of the prompt."""
    monkeypatch.setattr("cluster.cli.audit.audit.PROMPTS", ("w19 w12 w19 w12 w19",))
    toy = ToyServer(counts_prompt=True)
    results = await audit(toy.app, checks_of("presence", "frequency"))
    assert {result.verdict for result in results.values()} == {CheckVerdict.HOLDS}


async def test_a_small_budget_leaves_checks_without_a_verdict():
    results = await audit(ToyServer().app, checks_of("usage", "later-tokens"), max_requests=60)
    assert {result.verdict for result in results.values()} == {CheckVerdict.CANNOT_TELL}
    assert "--requests 60 are used up" in results["later-tokens"].sentence


async def test_two_servers_without_logprobs_are_compared_by_pairs_of_draws():
    def hidden(toy: ToyServer) -> Starlette:
        """The toy without logprobs."""

        async def complete(request: Request) -> Response:
            body = await request.json()
            return toy.answer({name: value for name, value in body.items() if name != "logprobs"}, ["x"])

        return app_of(complete)

    checks = checks_of("two-distributions", "temperature-1")
    results = await audit(hidden(ToyServer()), checks, other=hidden(ToyServer("argmax")))
    assert results["two-distributions"].verdict is CheckVerdict.FOUND
    assert results["temperature-1"].verdict is CheckVerdict.CANNOT_TELL
    assert "no logprobs" in results["temperature-1"].sentence
    results = await audit(hidden(ToyServer()), checks, other=hidden(ToyServer()))
    assert results["two-distributions"].verdict is CheckVerdict.HOLDS


async def _models(request: Request) -> Response:
    return JSONResponse({"data": [{"id": MODEL}]})


def app_of(complete: Callable[[Request], Any], models: Callable[[Request], Any] = _models) -> Starlette:
    return Starlette(routes=[Route("/v1/models", models), Route("/v1/completions", complete, methods=["POST"])])


def fixed(answer: Response) -> Starlette:
    async def complete(request: Request) -> Response:
        return answer

    return app_of(complete)


@pytest.mark.parametrize(
    ("app", "words"),
    [
        (fixed(PlainTextResponse("<html>rubbish")), "not in OpenAI's form"),
        (fixed(JSONResponse({"choices": []})), "no choices"),
        (fixed(JSONResponse({"choices": [{"text": 5}]})), "not in OpenAI's form"),
        (fixed(JSONResponse({"choices": [{"text": "x", "logprobs": {"content": [{}]}}]})), "not in OpenAI's form"),
        (fixed(JSONResponse({"error": {"message": "no"}}, 500)), "status 500: no"),
        (fixed(JSONResponse({}, 429, {"Retry-After": "0"})), "limits the rate"),
    ],
    ids=["HTML", "no choices", "a number", "no token", "500", "429"],
)
async def test_a_server_that_gives_no_answers_gets_a_sentence_and_no_verdict(app: Starlette, words: str):
    for result in (await audit(app, CHECKS)).values():
        assert result.verdict is CheckVerdict.CANNOT_TELL
        assert words in result.sentence


@pytest.mark.parametrize("is_back", [False, True])
async def test_checks_after_a_silence_try_the_server_again(is_back: bool):
    toy, num_left = ToyServer(), 40

    async def complete(request: Request) -> Response:
        nonlocal num_left
        num_left -= 1
        if -4 <= num_left < 0 or (num_left < 0 and not is_back):
            raise httpx.ReadError("gone")
        return await toy.complete(request)

    async def models(request: Request) -> Response:
        if num_left < 0 and not is_back:
            raise httpx.ReadError("gone")
        return JSONResponse({"data": [{"id": MODEL}]})

    results = await audit(app_of(complete, models), checks_of("usage", "max-tokens", "stops", "top-k", "second-ask"))
    assert not any(result.verdict is CheckVerdict.FOUND for result in results.values())
    assert any("gone" in result.sentence for result in results.values())
    if is_back:
        assert results["second-ask"].verdict is CheckVerdict.HOLDS
    else:
        assert "requests in a row" in results["second-ask"].sentence


@pytest.mark.parametrize("status", [401, 403])
async def test_a_server_that_needs_a_key_is_named(status: int):
    async def refuse(request: Request) -> Response:
        return JSONResponse({}, status)

    with pytest.raises(ConfigError, match="--key"):
        await audit(Starlette(routes=[Route("/v1/models", refuse)]), CHECKS)
    with pytest.raises(ConfigError, match="--key"):
        await audit(app_of(refuse), CHECKS)


async def test_fields_that_a_server_refuses_are_left_out():
    toy = ToyServer()

    async def complete(request: Request) -> Response:
        if {"top_k", "min_p", "return_token_ids"} & (await request.json()).keys():
            return JSONResponse({"error": {"message": "unknown field"}}, 400)
        return await toy.complete(request)

    results = await audit(app_of(complete), checks_of("top-p", "min-p", "logit-bias"))
    assert results["top-p"].verdict is CheckVerdict.HOLDS
    assert results["min-p"].verdict is CheckVerdict.CANNOT_TELL
    assert "unknown field" in results["min-p"].sentence
    assert "token ids" in results["logit-bias"].sentence


def test_p_values_are_corrected_by_holm():
    def result(p: float) -> Result:
        return Result("x", "", CheckVerdict.HOLDS, "", 1, 1, p, p, 1, 1.0, None)

    assert [each.corrected_p for each in corrected([result(0.04), result(0.01), result(0.9)])] == [0.08, 0.03, 0.9]
