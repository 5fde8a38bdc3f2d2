"""Two ways to the same answer: speculation on and off at one server, or two servers of the same model."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from cluster.cli.audit.client import CHAT, COMPLETIONS, Server
from cluster.cli.audit.positions import check_prefixes, compare_greedy, compare_prediction
from cluster.cli.audit.trial import NUM_POSITIONS, PROMPTS, Audit, Trial, all_of
from cluster.cli.audit.wire import Answer, Body, NoVerdictError, RefusedError

_SWITCHES: tuple[Body, ...] = ({"speculation": {"enabled": False}}, {"speculative.n_max": 0})
_DRAFT_COUNTS = ("accepted_draft_tokens", "rejected_draft_tokens", "draft_n", "num_draft_tokens")
_REPETITIVE = ("a b c d " * 6, "1, 2, 3, " * 6, "def f(x):\n    return x\n\n\n" * 4, "the cat and the dog, " * 5) * 2
_BAD: tuple[Body, ...] = (
    {"max_tokens": -5},
    {"temperature": -1.0},
    {"top_p": 2.0},
    {"n": 0},
    {"model": "no-such-model"},
    {"logit_bias": {"x": 1}},
    {"stop": 5},
)
_COIN = np.asarray([0.5, 0.5])
_LOADED = np.asarray([0.6, 0.4]), np.asarray([0.4, 0.6])


async def two_ways(audit: Audit) -> tuple[Server, Server, str]:
    """Return the two servers, or the server with and without drafts, and a text that names both ways.

    Raises:
        NoVerdictError: no request turns its drafts off.
    """
    if audit.other is not None:
        return audit.server, audit.other, f"{audit.server.url} and {audit.other.url}"
    if audit.plain is None:
        audit.plain = await _without_drafts(audit.server)
    return audit.server, audit.plain, f"with drafts and with {audit.plain.extra}"


async def _without_drafts(server: Server) -> Server:
    """Return the server with the switch that always turns drafts off, where there often are some."""
    for switch in _SWITCHES:
        plain = replace(server, extra=switch)
        try:
            pairs = [[await _greedy(way, text) for way in (server, plain)] for text in _REPETITIVE]
        except RefusedError:
            continue
        drafts = [[_num_drafts(answer.data) for answer in way] for way in zip(*pairs, strict=True)]
        if sum(map(bool, drafts[0])) >= len(_REPETITIVE) / 2 and not any(drafts[1]):
            return plain
    raise NoVerdictError("no request is seen to turn drafts off; give --against the address of a server without them")


async def distributions(audit: Audit, trial: Trial) -> None:
    """Give one way's texts to the other: the next tokens have the same distribution."""
    one, two, ways = await two_ways(audit)
    if not (one.num_top and two.num_top) or one.is_chat or two.is_chat:
        await _compare_draws(one, two, ways, trial)
        return
    part, noise, num_tried = trial.hits(), random.Random(2), 0
    while not trial.is_enough():
        text = noise.choice(audit.open_prompts(16)).text
        answer = await one.ask(text, max_tokens=NUM_POSITIONS, logprobs=one.num_top)
        choice = answer.choices[0]
        for position, prediction in enumerate(choice.predictions[:NUM_POSITIONS]):
            num_tried += 1
            other = await two.forced(text, choice, position)
            expected = f"token {position + 1} has the distribution of the other way"
            compare_prediction(trial, part, answer, expected, prediction, other)
        check_prefixes(part, num_tried)
    trial.sentence = f"{part.num_hits} of {part.num_draws} distributions differ, {ways}"


async def _compare_draws(one: Server, two: Server, ways: str, trial: Trial) -> None:
    """Without logprobs: draw from both in pairs. Where one of a pair is the most frequent text, each is with 1/2."""
    part, usual = trial.draws(2), dict[str, str]()
    number = min(one.max_choices, two.max_choices)
    while not trial.is_enough():
        for prompt in PROMPTS[:4]:
            pair = await all_of(way.ask(prompt, max_tokens=2, n=number) for way in (one, two))
            texts = [[choice.text for choice in answer.choices] for answer in pair]
            if prompt not in usual:
                usual[prompt] = Counter(texts[0] + texts[1]).most_common(1)[0][0]
                continue
            for mine, theirs in zip(*texts, strict=False):
                if (mine == usual[prompt]) != (theirs == usual[prompt]):
                    part.add(_COIN, [int(mine == usual[prompt]), int(theirs == usual[prompt])], _LOADED)
        trial.sentence = f"draws in pairs, {ways}: {part.num_top:.0f} of {part.num_draws} differences favour the first"


async def greedy(audit: Audit, trial: Trial) -> None:
    """Compare greedy texts token by token."""
    one, two, ways = await two_ways(audit)
    part, num_same, num_all = trial.hits(), 0, 0
    while not trial.is_enough():
        for prompt in PROMPTS:
            pair = await all_of(_greedy(way, prompt) for way in (one, two))
            is_same = pair[0].choices[0].text == pair[1].choices[0].text
            num_same, num_all = num_same + is_same, num_all + 1
            if pair[0].choices[0].predictions and pair[1].choices[0].predictions:
                compare_greedy(trial, part, *pair)
            elif is_same:
                trial.hit(part, pair[0], "the same text", None)
            else:
                raise NoVerdictError("greedy texts differ, and without logprobs a near tie is not known from a fault")
    trial.sentence = f"{num_same} of {num_all} greedy texts are the same, the others part at near ties, {ways}"


async def refusals(audit: Audit, trial: Trial) -> None:
    """Compare the refusals of bad requests to the letter."""
    one, two, ways = await two_ways(audit)
    part = trial.hits()
    while not trial.is_enough():
        for bad in _BAD:
            pair = await all_of(_refusal(way, bad) for way in (one, two))
            seen = None if pair[0] == pair[1] else f"{pair[1]}"
            body = two.body("x", max_tokens=1) | bad
            trial.hit(part, Answer(two.request(body), (), {}), f"{pair[0]}", seen)
    trial.sentence = f"{part.num_hits} of {part.num_draws} refusals differ, {ways}"


async def seeds(audit: Audit, trial: Trial) -> None:
    """Compare texts of equal seeds, where the server repeats them."""
    one, two, ways = await two_ways(audit)
    if not ("seed" in one.neutral and "seed" in two.neutral):
        raise NoVerdictError("the server takes no seed")
    part, seed = trial.hits(), 0
    while not trial.is_enough():
        seed += 1
        prompt = PROMPTS[seed % len(PROMPTS)]
        asked = [way.ask(prompt, max_tokens=NUM_POSITIONS, seed=seed) for way in (one, one, two)]
        first, again, other = [answer.choices[0].text for answer in await all_of(asked)]
        if first != again:
            raise NoVerdictError("the server does not repeat the text of a seed")
        if first != other:
            raise NoVerdictError(f"a seed gives other texts {ways}; only a coupled sampler promises the same")
        part.add(False)
    trial.sentence = f"{part.num_draws} seeds give the same texts, {ways}"


async def _greedy(server: Server, text: str) -> Answer:
    return await server.ask(text, max_tokens=24, temperature=0.0, logprobs=server.num_top or None)


async def _refusal(server: Server, bad: Body) -> str:
    """Return the status and message of a bad request."""
    try:
        await server.post(CHAT if server.is_chat else COMPLETIONS, server.body("x", max_tokens=1) | bad)
    except RefusedError as refused:
        return f"status {refused.status}: {refused.message.replace(server.model, 'MODEL')}"
    return "accepted"


def _num_drafts(data: Any) -> float:
    """Add up the counts of draft tokens anywhere in an answer."""
    if isinstance(data, dict):
        own = sum(data[name] for name in _DRAFT_COUNTS if isinstance(data.get(name), int | float))
        return float(own) + sum(_num_drafts(each) for each in data.values())
    return sum(_num_drafts(each) for each in data) if isinstance(data, list) else 0.0
