"""All checks of an audit, one after the other, and their verdicts corrected for how many there are."""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import httpx

from cluster.cli.audit import answers, positions, sampling
from cluster.cli.audit.client import RequestBudget, Server, explore, seeds_from
from cluster.cli.audit.trial import PROMPTS, Audit, CheckVerdict, Finding, OpenPrompt, Trial, all_of
from cluster.cli.audit.wire import TIMEOUT_S, NoVerdictError, RefusedError, fetch
from protos.errors import ConfigError

ALPHA = 1e-4  # of any false alarm in an audit of a server that does as it reports


@dataclass(frozen=True, slots=True)
class Check:
    """A check: its claim, and the function that gathers evidence against it."""

    name: str
    claim: str
    run: Callable[[Audit, Trial], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Result:
    """The verdict of a check; `corrected_p` is Holm's."""

    name: str
    claim: str
    verdict: CheckVerdict
    sentence: str
    num_draws: int
    num_needed: int
    p_value: float
    corrected_p: float
    num_requests: int
    seconds: float
    finding: Finding | None


# Cheap checks first: with a small budget only the finest ones reach no verdict.
CHECKS = (
    Check("usage", "usage counts the tokens of the answer", answers.usage),
    Check("max-tokens", "no answer is longer than max_tokens", answers.max_tokens),
    Check("min-tokens", "no answer is shorter than min_tokens", answers.min_tokens),
    Check("stops", "an answer ends before its stop", answers.stops),
    Check("top-p", "top_p keeps the nucleus alone", partial(sampling.first_tokens, name="top_p")),
    Check("top-k", "top_k keeps the likeliest tokens alone", partial(sampling.first_tokens, name="top_k")),
    Check("min-p", "min_p keeps the tokens near the likeliest alone", partial(sampling.first_tokens, name="min_p")),
    Check("logit-bias", "logit_bias changes its token's logit", partial(sampling.first_tokens, name="logit_bias")),
    Check("presence", "presence_penalty counts each token that occurs", sampling.presence_penalty),
    Check("frequency", "frequency_penalty counts each token as often as it occurs", sampling.frequency_penalty),
    Check("later-parameters", "each parameter holds at tokens 2 to 4, where drafts decide", sampling.later_parameters),
    Check("second-ask", "greedy tokens are the likeliest, and logprobs repeat", positions.second_ask),
    Check("prefixes", "a later token has the distribution that its prefix has as a prompt", positions.forced_prefixes),
    Check("company", "other requests change nothing", positions.company),
    Check("cache", "later asks, and asks after eviction, change nothing", positions.cache),
    Check("json", "every answer with a JSON schema is valid", answers.json_schemas),
    Check("tools", "every required tool call is valid", answers.tool_calls),
    Check("speed", "reported speed is the speed from outside", answers.speed),
    Check("two-refusals", "speculation changes no refusal", positions.refusals),
    Check("two-seeds", "speculation changes no text of a seed", positions.seeds),
    Check("two-greedy", "speculation changes no greedy text", positions.greedy),
    Check("two-distributions", "speculation changes no distribution", positions.distributions),
    Check(
        "temperature-0.7",
        "first tokens at temperature 0.7 are drawn as reported",
        partial(sampling.first_tokens, name="temperature"),
    ),
    Check("temperature-1", "first tokens at temperature 1 are drawn as reported", sampling.temperature_one),
    Check("later-tokens", "tokens 2 to 8 are drawn as reported", positions.later_tokens),
)


async def connect(
    url: str, key: str, model: str | None, budget: RequestBudget, transport: httpx.AsyncBaseTransport | None = None
) -> Server:
    """Return a server with the model to audit.

    Raises:
        ConfigError: it does not answer, needs another key, or does not have the model.
    """
    http = httpx.AsyncClient(
        headers={"Authorization": f"Bearer {key}"},
        timeout=TIMEOUT_S,
        transport=transport,
        limits=httpx.Limits(max_connections=None),
    )
    try:
        return Server(http, url, await _model_at(http, url, model), budget)
    except ConfigError:
        await http.aclose()
        raise


async def _model_at(http: httpx.AsyncClient, url: str, model: str | None) -> str:
    """Return the model's name, by default the first one of the server."""
    try:
        response = await fetch(http, "GET", f"{url}/models", None, TIMEOUT_S)
    except NoVerdictError as error:
        raise ConfigError(f"no server answers at {url}: {error}; give its address") from None
    if response.status_code in (401, 403):
        raise ConfigError(f"the server at {url} refuses the key (status {response.status_code}); give --key")
    try:
        return model or str(response.json()["data"][0]["id"])
    except (ValueError, TypeError, LookupError):
        raise ConfigError(f"the server at {url} does not list its models; give --model") from None


async def run_audit(
    server: Server, other: Server | None, checks: Sequence[Check], progress: Callable[[str, Result | None], None]
) -> list[Result]:
    """Run checks; `progress` is called with a name before each one, and with its result after it."""
    audit = Audit(server, other)
    if other is not None:
        # Equal seeds may give equal texts, which show nothing of a distribution.
        other.seeds = seeds_from(1_000_000_000)
    threshold = math.log(len(checks) / ALPHA)
    why = await _prepare(audit)
    results = []
    for check in checks:
        progress(check.name, None)
        results.append(await _run(check, audit, threshold, why))
        progress(check.name, results[-1])
    return corrected(results)


async def _prepare(audit: Audit) -> str | None:
    """Explore the servers and ask for the prompts' distributions; return a sentence if that fails."""
    try:
        for server in filter(None, (audit.server, audit.other)):
            await explore(server, PROMPTS[0])
    except RefusedError as error:
        if error.status in (401, 403):
            raise ConfigError(f"{error}; give --key") from None
        return str(error)
    except NoVerdictError as error:
        return str(error)
    server = audit.server
    # Without logprobs the checks of counts and formats still run, and the checks of draws do not.
    if not server.num_top:
        audit.why_no_prompts = "the server reports no logprobs"
        return None
    try:
        predictions = await all_of(server.predict(text) for text in PROMPTS)
    except NoVerdictError as error:
        audit.why_no_prompts = str(error)
        return None
    pairs = zip(PROMPTS, predictions, strict=True)
    audit.prompts = [OpenPrompt(text, first) for text, first in pairs if first is not None and first.named]
    audit.why_no_prompts = "the reported tokens have no text"
    return None


async def _run(check: Check, audit: Audit, threshold: float, why: str | None) -> Result:
    trial = Trial(threshold)
    began_s, before = time.monotonic(), audit.server.budget.num_requests
    try:
        if why is not None:
            raise NoVerdictError(why)
        if audit.server.budget.num_failures:
            await audit.server.find_again()
        await check.run(audit, trial)
        reason = None if trial.is_enough() else "too few draws for the stated power"
    except NoVerdictError as error:
        reason = str(error)
    # A finding counts whatever interrupted the check; without one, a reason leaves no verdict.
    is_found = trial.is_found()
    if is_found and trial.finding is not None and not trial.sentence:
        trial.sentence = f"expected {trial.finding.expected}, seen {trial.finding.seen}"
    sentence = "; ".join(filter(None, (trial.sentence, None if is_found else reason)))
    if reason and not is_found and trial.num_draws:
        sentence += f"; {trial.num_draws} of some {trial.num_needed} draws"
    return Result(
        name=check.name,
        claim=check.claim,
        verdict=CheckVerdict.FOUND if is_found else CheckVerdict.CANNOT_TELL if reason else CheckVerdict.HOLDS,
        sentence=sentence,
        num_draws=trial.num_draws,
        num_needed=trial.num_needed,
        p_value=trial.p_value,
        corrected_p=trial.p_value,
        num_requests=audit.server.budget.num_requests - before,
        seconds=round(time.monotonic() - began_s, 2),
        finding=trial.finding if is_found else None,
    )


def corrected(results: Sequence[Result]) -> list[Result]:
    """Correct the p-values for the number of checks by Holm's method; each finding has ALPHA at most."""
    order = sorted(range(len(results)), key=lambda rank: results[rank].p_value)
    changed, least = list(results), 0.0
    for num_smaller, rank in enumerate(order):
        least = max(least, min(1.0, results[rank].p_value * (len(results) - num_smaller)))
        changed[rank] = replace(results[rank], corrected_p=least)
    return changed
