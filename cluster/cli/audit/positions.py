"""Later positions, where drafts decide, and the same text asked in another way: again, in company, from a cache."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

from cluster.cli.audit.client import Server
from cluster.cli.audit.evidence import HitEvidence
from cluster.cli.audit.prediction import Prediction
from cluster.cli.audit.sampling import top_sentence
from cluster.cli.audit.trial import NUM_POSITIONS, Audit, Trial, add_path_draws, all_of
from cluster.cli.audit.wire import Answer, NoVerdictError

FAR = 0.1  # total variation between two asks that rounding does not explain
_WORDS = ("river", "stone", "apple", "cloud", "table", "green", "seven", "paper", "winter", "music", "garden", "silver")


async def later_tokens(audit: Audit, trial: Trial) -> None:
    """Draw tokens 2 to 8, each against the distribution reported with it."""
    part, seen = trial.draws(), dict[tuple[str, ...], str]()
    while not trial.is_enough():
        for prompt in audit.open_prompts(8):
            for answer in await _paths(audit.server, prompt.text):
                add_path_draws(trial, part, answer, seen, first=1)
        if not part.num_draws:
            raise NoVerdictError("answers report no distributions after the first token")
    trial.sentence = top_sentence(part.num_top, part.expected_top, part.num_draws)


async def forced_prefixes(audit: Audit, trial: Trial) -> None:
    """Give the first tokens of an answer as a prompt: the next token must have the distribution reported with it."""
    part, noise, num_tried = trial.hits(), random.Random(1), 0
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
    """Compare the distribution reported in an answer with one after the same tokens; None could not be asked for."""
    if again is not None:
        distance = again.distance(prediction)
        trial.hit(part, answer, expected, f"{distance:.2f} away from it" if distance > FAR else None)


def check_prefixes(part: HitEvidence, num_tried: int) -> None:
    """Raise NoVerdictError if many prefixes were tried and the server took none."""
    if num_tried > 400 and not part.num_draws:  # so many prefixes the server may refuse
        raise NoVerdictError("the server reads the text of its own tokens as other tokens, so no prefix can be given")


async def second_ask(audit: Audit, trial: Trial) -> None:
    """Ask for greedy texts twice: each token is the likeliest one, and both report the same."""
    part = trial.hits()
    prompts = [prompt.text for prompt in audit.open_prompts(99)]
    while not trial.is_enough():
        for text in prompts:
            answers = await all_of(_greedy(audit.server, text) for _ in range(2))
            compare_greedy(trial, part, *answers)
    trial.sentence = f"{part.num_hits} of {part.num_draws} tokens differ"


async def company(audit: Audit, trial: Trial) -> None:
    """Compare answers alone with answers among 16 other requests."""
    prompts = [prompt.text for prompt in audit.open_prompts(8)]
    part, draws, seen = trial.hits(), trial.draws(is_planned=False), dict[tuple[str, ...], str]()
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
    part, draws, seen = trial.hits(), trial.draws(is_planned=False), dict[tuple[str, ...], str]()
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


async def _greedy(server: Server, text: str) -> Answer:
    return await server.ask(text, max_tokens=NUM_POSITIONS, temperature=0.0, logprobs=server.num_top)


async def _paths(server: Server, text: str) -> Sequence[Answer]:
    fields = {"max_tokens": NUM_POSITIONS, "logprobs": server.num_drawn, "n": server.max_choices}
    return await all_of(server.ask(text, **fields) for _ in range(server.width))


async def _keep_busy(server: Server, rank: int) -> None:
    noise = random.Random(rank)
    while True:
        await server.ask(_filler(noise), max_tokens=64)


def _filler(noise: random.Random) -> str:
    return " ".join(noise.choices(_WORDS, k=100))
