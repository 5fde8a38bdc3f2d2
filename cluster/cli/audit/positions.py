"""Later positions, where drafts decide, and the same text asked in another way.

Again, in company, from a cache, without drafts, or at another server of the same model.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cluster.cli.audit.client import CHAT, COMPLETIONS, Server
from cluster.cli.audit.evidence import DrawEvidence, HitEvidence, Prediction
from cluster.cli.audit.sampling import top_sentence
from cluster.cli.audit.trial import NUM_POSITIONS, PROMPTS, Audit, Trial, add_path_draws, all_of
from cluster.cli.audit.wire import Answer, Body, NoVerdictError, RefusedError

FAR = 0.1  # total variation between two asks that rounding does not explain
_WORDS = ("river", "stone", "apple", "cloud", "table", "green", "seven", "paper", "winter", "music", "garden", "silver")


async def later_tokens(audit: Audit, trial: Trial) -> None:
    """Draw tokens 2 to 8, each against the distribution reported with it."""
    part, seen = trial.add(DrawEvidence()), dict[tuple[str, ...], str]()
    while not trial.is_enough():
        for prompt in audit.open_prompts(8):
            for answer in await _paths(audit.server, prompt.text):
                add_path_draws(trial, part, answer, seen, first=1)
        if not part.num_draws:
            raise NoVerdictError("answers report no distributions after the first token")
    trial.sentence = top_sentence(part.num_top, part.expected_top, part.num_draws)


async def forced_prefixes(audit: Audit, trial: Trial) -> None:
    """Give the first tokens of an answer as a prompt: the next token must have the distribution reported with it."""
    part, noise, num_tried = trial.add(HitEvidence()), random.Random(1), 0
    prompts = audit.open_prompts(16)
    while not trial.is_enough():
        prompt = noise.choice(prompts)
        answer = await audit.server.ask(
            prompt.text, max_tokens=NUM_POSITIONS, logprobs=audit.server.num_top, n=min(4, audit.server.max_choices)
        )
        for choice in answer.choices:
            for position in range(1, min(NUM_POSITIONS, len(choice.predictions))):
                num_tried += 1
                again = await audit.server.forced(prompt.text, choice, position)
                prefix = "".join(choice.tokens[:position])
                expected = f"after {prefix!r} the distribution that the prompt with this text has"
                compare_prediction(trial, part, answer, expected, choice.predictions[position], again)
        check_prefixes(part, num_tried)
    trial.sentence = f"{part.num_hits} of {part.num_draws} distributions differ by more than {FAR:.0%}"


def compare_prediction(
    trial: Trial, part: HitEvidence, answer: Answer, expected: str, prediction: Prediction, again: Prediction | None
) -> None:
    """Compare the distribution reported in an answer with `again`, after the same tokens; None if none could be had."""
    if again is not None:
        distance = again.distance(prediction)
        trial.hit(part, answer, expected, f"{distance:.2f} away from it" if distance > FAR else None)


def check_prefixes(part: HitEvidence, num_tried: int) -> None:
    """Raise NoVerdictError if many prefixes were tried and the server took none."""
    if num_tried > 400 and not part.num_draws:  # so many prefixes the server may refuse
        raise NoVerdictError("the server reads the text of its own tokens as other tokens, so no prefix can be given")


async def second_ask(audit: Audit, trial: Trial) -> None:
    """Ask for greedy texts twice: each token is the likeliest one, and both report the same."""
    part = trial.add(HitEvidence())
    prompts = [prompt.text for prompt in audit.open_prompts(99)]
    while not trial.is_enough():
        for text in prompts:
            answers = await all_of(_greedy(audit.server, text) for _ in range(2))
            compare_greedy(trial, part, *answers)
    trial.sentence = f"{part.num_hits} of {part.num_draws} tokens differ"


async def company(audit: Audit, trial: Trial) -> None:
    """Compare answers alone with answers among 16 other requests."""
    prompts = [prompt.text for prompt in audit.open_prompts(8)]
    part, draws = trial.add(HitEvidence()), trial.add(DrawEvidence(), is_planned=False)
    seen: dict[tuple[str, ...], str] = {}
    single = replace(audit.server, max_choices=1)  # llama.cpp waits until all choices of a request find a slot
    alone = [await _greedy(audit.server, text) for text in prompts]
    others = [asyncio.ensure_future(_keep_busy(audit.server, rank)) for rank in range(16)]
    try:
        while not trial.is_enough():
            for text, before in zip(prompts, alone, strict=True):
                compare_greedy(trial, part, before, await _greedy(audit.server, text))
            for answer in await _paths(single, prompts[0]):
                add_path_draws(trial, draws, answer, seen)
    finally:
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    trial.sentence = f"{part.num_hits} of {part.num_draws} tokens differ among {len(others)} other requests"


async def cache(audit: Audit, trial: Trial) -> None:
    """Compare the first ask of a prompt with later asks, and with one after many other prompts."""
    audit.open_prompts(1)
    server, noise = audit.server, random.Random()
    part, draws = trial.add(HitEvidence()), trial.add(DrawEvidence(), is_planned=False)
    seen: dict[tuple[str, ...], str] = {}
    num_cached = 0
    while not trial.is_enough():
        firsts = []
        for prompt in audit.open_prompts(8):
            # Ask each new prompt at once and again, when its prefix may be cached.
            text = f"{_filler(noise)} {prompt.text}"
            first = await _greedy(server, text)
            firsts.append((text, first))
            for answer in await _paths(server, text):
                add_path_draws(trial, draws, answer, seen)
            later = await _greedy(server, text)
            num_cached += bool((later.usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
            compare_greedy(trial, part, first, later)
        for _ in range(4):  # 64 other prompts, to evict the prefixes
            await all_of(server.ask(_filler(noise), max_tokens=1) for _ in range(16))
        # Ask a last time, when it may have been evicted.
        for text, first in firsts:
            compare_greedy(trial, part, first, await _greedy(server, text))
    known = f", {num_cached} reported as cached" if num_cached else ""
    trial.sentence = f"{part.num_hits} of {part.num_draws} tokens differ in later asks{known}"


def compare_greedy(trial: Trial, part: HitEvidence, first: Answer, again: Answer) -> None:
    """Compare two greedy answers token by token as long as their texts agree.

    A token below the likeliest one, or another distribution, is a fault; at a near tie both tokens are right.
    """
    one, two = first.choices[0], again.choices[0]
    for position, (token, other) in enumerate(zip(one.tokens, two.tokens, strict=False)):
        if position >= min(len(one.predictions), len(two.predictions)):
            return
        prediction, second = one.predictions[position], two.predictions[position]
        gap = max(prediction.gap_below_top(token), second.gap_below_top(other))
        distance = prediction.distance(second)
        seen = None
        if gap > 0.25:  # nats between two tokens that rounding may exchange
            seen = f"token {position + 1} ({other!r}) is {gap:.2f} nats less likely than the likeliest one"
        elif distance > FAR:
            seen = f"the distribution of token {position + 1} ({other!r}) is {distance:.2f} away from the first ask's"
        trial.hit(part, again, f"greedy: {one.text!r}", seen)
        if token != other:
            return


async def _greedy(server: Server, text: str, num_tokens: int = NUM_POSITIONS) -> Answer:
    return await server.ask(text, max_tokens=num_tokens, temperature=0.0, logprobs=server.num_top or None)


async def _paths(server: Server, text: str) -> Sequence[Answer]:
    fields = {"max_tokens": NUM_POSITIONS, "logprobs": server.num_drawn, "n": server.max_choices}
    return await all_of(server.ask(text, **fields) for _ in range(server.width))


async def _keep_busy(server: Server, rank: int) -> None:
    noise = random.Random(rank)
    while True:
        await server.ask(_filler(noise), max_tokens=64)


def _filler(noise: random.Random) -> str:
    return " ".join(noise.choices(_WORDS, k=100))


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
            pairs = [[await _greedy(way, text, 24) for way in (server, plain)] for text in _REPETITIVE]
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
    part, noise, num_tried = trial.add(HitEvidence()), random.Random(2), 0
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
    part, usual = trial.add(DrawEvidence(2)), dict[str, str]()
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
    part, num_same, num_all = trial.add(HitEvidence()), 0, 0
    while not trial.is_enough():
        for prompt in PROMPTS:
            pair = await all_of(_greedy(way, prompt, 24) for way in (one, two))
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
    part = trial.add(HitEvidence())
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
    part, seed = trial.add(HitEvidence()), 0
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
