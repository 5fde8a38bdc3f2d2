"""First tokens: sampling follows the request's parameters, against the server's own logprobs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.cli.audit.checks.context import Audit, Prompt, add_first_draws, all_of, first_token
from cluster.cli.audit.client import Answer, NoVerdictError, Server
from cluster.cli.audit.evidence import LeastEvidence
from cluster.cli.audit.prediction import Claim, Prediction, filtered, tempered, weighted_claim
from cluster.cli.audit.trial import Trial

_LEAST_DRAWS = 512  # whatever the planned fault takes
_LEAST_EFFECT = 2e-3  # nats per draw of an ignored parameter; below it, the draws would be too many
_MARGIN = 0.03  # from a filter's bound to the nearest token: rounding does not cross it
_LEAST_REMOVED = 0.15
_BIAS = -2.0
_PENALTY = 1.0
_LEAST_REPEATED = 0.02  # share of texts that begin with a token twice
_PATH = 4  # tokens of an answer with penalties
_NUM_PREFIXES = 24


@dataclass(frozen=True, slots=True)
class Setting:
    """A request's parameters for a prompt, and the distribution that they claim."""

    prompt: Prompt
    params: dict[str, Any]
    claim: Claim

    @property
    def text(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.params.items())


async def temperature_one(audit: Audit, trial: Trial) -> None:
    """Draw from the four prompts that show a shift of the likeliest token best."""
    prompts = audit.open_prompts(4)
    part = trial.draws()
    while not trial.is_enough():
        for prompt in prompts:
            await add_first_draws(trial, part, audit.server, prompt.text, None, {})
        if not part.num_draws:
            raise NoVerdictError("answers have no logprobs")
    trial.sentence = top_sentence(part.num_top, part.expected_top, part.num_draws)


def top_sentence(num_top: float, expected: float, number: int) -> str:
    """Return how often the likeliest token came."""
    return (
        f"the likeliest token came in {num_top / max(1, number):.2%} of draws; reported {expected / max(1, number):.2%}"
    )


async def temperature_low(audit: Audit, trial: Trial) -> None:
    """Draw at temperature 0.7."""
    await _draw(audit, trial, _tempered)


async def top_p(audit: Audit, trial: Trial) -> None:
    """Draw from a nucleus in the middle of a token's share."""
    await _draw(audit, trial, _nuclei)


async def top_k(audit: Audit, trial: Trial) -> None:
    """Draw from the likeliest tokens."""
    await _draw(audit, trial, _top_ks)


async def min_p(audit: Audit, trial: Trial) -> None:
    """Draw from the tokens near the likeliest one."""
    await _draw(audit, trial, _min_ps)


async def _draw(audit: Audit, trial: Trial, settings: Callable[[Prompt], Iterator[Setting]]) -> None:
    """Draw with the setting whose loss would show best."""
    found = [setting for prompt in audit.open_prompts(99) for setting in settings(prompt)]
    best = max(found, key=lambda setting: setting.claim.effect, default=None)
    if best is None or best.claim.effect < _LEAST_EFFECT:
        raise NoVerdictError("no prompt's distribution would show the parameter")
    await _draw_setting(audit.server, trial, best)


async def _draw_setting(server: Server, trial: Trial, setting: Setting) -> None:
    part = trial.draws(1)
    trial.sentence = f"{setting.text} after {setting.prompt.text!r}"
    while not (trial.is_found() or (trial.is_enough() and trial.num_draws >= _LEAST_DRAWS)):
        asked = part.num_draws
        await add_first_draws(trial, part, server, setting.prompt.text, setting.claim, setting.params)
        if part.num_draws == asked:
            raise NoVerdictError(f"no draw with {setting.text} is among the reported tokens")


def _tempered(prompt: Prompt) -> Iterator[Setting]:
    if (claim := tempered(prompt.first, 0.7)) is not None and sum(prompt.first.probs) > 0.5:
        yield Setting(prompt, {"temperature": 0.7}, claim)


def _nuclei(prompt: Prompt) -> Iterator[Setting]:
    total = 0.0
    for number, prob in enumerate(prompt.first.probs, 1):
        if prob > 2 * _MARGIN:
            yield from _filter(prompt, number, "top_p", round(total + prob / 2, 4))
        total += prob


def _top_ks(prompt: Prompt) -> Iterator[Setting]:
    probs = prompt.first.probs
    for number in range(1, len(probs)):
        if probs[number] * (1 + 4 * _MARGIN) < probs[number - 1]:
            yield from _filter(prompt, number, "top_k", number)


def _min_ps(prompt: Prompt) -> Iterator[Setting]:
    probs = prompt.first.probs
    for number in range(1, len(probs)):
        if probs[number] * (1 + 8 * _MARGIN) < probs[number - 1]:
            bound = math.sqrt(probs[number] * probs[number - 1]) / probs[0]
            yield from _filter(prompt, number, "min_p", round(bound, 4))


def _filter(prompt: Prompt, num_kept: int, name: str, value: float) -> Iterator[Setting]:
    """Yield the setting if the filter removes enough; one token alone would be greedy decoding."""
    removed = 1 - sum(prompt.first.probs[:num_kept])
    claim = filtered(prompt.first, num_kept)
    if claim is not None and len(claim.cells) > 1 and removed > _LEAST_REMOVED:
        yield Setting(prompt, {name: value}, claim)


async def logit_bias(audit: Audit, trial: Trial) -> None:
    """Bias the likeliest token down."""
    prompt = audit.open_prompts(1)[0]
    token, _ = prompt.first.named[0]
    token_id = await _token_id(audit.server, prompt, token)
    claim = weighted_claim(prompt.first, lambda each, prob: math.exp(_BIAS) if each == token else 1.0)
    if claim is None:
        raise NoVerdictError("no prompt's distribution would show the parameter")
    await _draw_setting(audit.server, trial, Setting(prompt, {"logit_bias": {str(token_id): _BIAS}}, claim))


async def _token_id(server: Server, prompt: Prompt, token: str) -> int:
    """Return a token's id, by vLLM's `return_token_ids` or by the `id` of llama-server's logprobs.

    Raises:
        NoVerdictError: the server does not show ids.
    """
    answer = await server.ask(prompt.text, max_tokens=1, temperature=0.0, logprobs=server.num_top)
    choice = answer.data["choices"][0]
    content = (choice.get("logprobs") or {}).get("content") or [{}]
    found: Any = (choice.get("token_ids") or [content[0].get("id")])[0]
    if first_token(answer.choices[0]) != token or not isinstance(found, int):
        raise NoVerdictError("the server does not show token ids, which logit_bias needs")
    return found


async def presence_penalty(audit: Audit, trial: Trial) -> None:
    """Draw the next tokens under a penalty of tokens that occur."""
    await _penalized(audit, trial, "presence_penalty", lambda count: _PENALTY * (count > 0))


async def frequency_penalty(audit: Audit, trial: Trial) -> None:
    """Draw the next tokens under a penalty of each occurrence."""
    await _penalized(audit, trial, "frequency_penalty", lambda count: _PENALTY * count)


async def _penalized(audit: Audit, trial: Trial, name: str, penalty: Callable[[int], float]) -> None:
    """Draw short texts that repeat their own tokens, and weigh each token after the most frequent prefixes.

    Servers differ in whether the prompt's tokens count. A finding needs both readings to be refuted.
    """
    prompt = await _most_repeating(audit)
    trial.sentence = f"{name} {_PENALTY} after {prompt.text!r}"
    server, part = audit.server, trial.least_of(2)
    fields = {"max_tokens": _PATH, "logprobs": 1, "n": server.max_choices, name: _PENALTY}
    plain: dict[tuple[str, ...], Prediction | None] = {}
    while not trial.is_enough():
        answers: list[Answer] = []
        while sum(len(answer.choices) for answer in answers) < _LEAST_DRAWS:
            answers += await all_of(server.ask(prompt.text, **fields) for _ in range(server.width))
        if not plain:
            plain[()] = prompt.first
            plain |= await _after_prefixes(server, prompt, answers)
        for answer in answers:
            before = part.log_evidence
            for prefix, prediction in plain.items():
                if prediction is not None:
                    _weigh_penalized(part, prompt, answer, prefix, prediction, penalty)
            if (claim := _reduced(prompt.first, (), _nothing, penalty)) is not None:
                trial.show(part.log_evidence - before, answer, claim, repr([each.text for each in answer.choices[:8]]))
        if not any(plain[prefix] for prefix in plain if prefix):
            raise NoVerdictError("the server shows no token ids, and no prefix of words can be given")


async def _after_prefixes(
    server: Server, prompt: Prompt, answers: Sequence[Answer]
) -> dict[tuple[str, ...], Prediction | None]:
    """Return the plain distributions after the most frequent beginnings of answers."""
    choices = [choice for answer in answers for choice in answer.choices]
    prefixes = Counter(each.tokens[:length] for each in choices for length in range(1, min(_PATH, len(each.tokens))))
    usual = [prefix for prefix, _ in prefixes.most_common(_NUM_PREFIXES)]
    found = {prefix: next(each for each in choices if each.tokens[: len(prefix)] == prefix) for prefix in usual}
    return {prefix: await server.forced(prompt.text, choice, len(prefix)) for prefix, choice in found.items()}


def _weigh_penalized(
    part: LeastEvidence,
    prompt: Prompt,
    answer: Answer,
    prefix: tuple[str, ...],
    plain: Prediction,
    penalty: Callable[[int], float],
) -> None:
    """Add the tokens after a prefix, by both readings."""
    drawn: Counter[str | None] = Counter(
        each.tokens[len(prefix)]
        for each in answer.choices
        if each.tokens[: len(prefix)] == prefix and len(each.tokens) > len(prefix)
    )
    readings: tuple[Callable[[str], int], ...] = (_nothing, prompt.text.count)
    for reading, in_prompt in zip(part.parts, readings, strict=True):
        claim = _reduced(plain, prefix, in_prompt, penalty)
        if claim is not None and claim.ignored is not None and drawn:
            reading.add(claim.probs, claim.counts(drawn), (claim.ignored,))


def _nothing(token: str) -> int:
    return 0


def _reduced(
    plain: Prediction, prefix: tuple[str, ...], in_prompt: Callable[[str], int], penalty: Callable[[int], float]
) -> Claim | None:
    """The distribution with each token's penalty for its count in the prefix and, by one reading, in the prompt."""
    return weighted_claim(plain, lambda token, prob: math.exp(-penalty(prefix.count(token) + in_prompt(token))))


async def _most_repeating(audit: Audit) -> Prompt:
    """Return the prompt with the most probable repetition of its likeliest token."""

    async def share(prompt: Prompt) -> float:
        answer = await audit.server.ask(prompt.text, max_tokens=1, temperature=0.0, logprobs=1)
        if not answer.choices[0].tokens:
            return 0.0
        after = await audit.server.forced(prompt.text, answer.choices[0], 1)
        token, prob = prompt.first.named[0]
        return 0.0 if after is None else prob * dict(after.named).get(token, 0.0)

    prompts = audit.open_prompts(99)
    shares = await all_of(share(prompt) for prompt in prompts)
    if max(shares) < _LEAST_REPEATED:
        raise NoVerdictError("no prompt makes the model repeat a token")
    return prompts[shares.index(max(shares))]
