"""Sampling follows the request's parameters, at first tokens and at those after them, against the server's logprobs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from cluster.cli.audit.client import Server
from cluster.cli.audit.evidence import (
    Claim,
    DrawEvidence,
    LeastEvidence,
    Prediction,
    filtered,
    tempered,
    weighted_claim,
)
from cluster.cli.audit.trial import Audit, OpenPrompt, Trial, add_first_draws, all_of, first_token
from cluster.cli.audit.wire import Answer, NoVerdictError

_LEAST_DRAWS = 512  # whatever the planned fault takes
_PATH = 4  # tokens of an answer
_FILTERS = ("top_p", "top_k", "min_p")
_SHORT_WORDS = re.compile(r"\w{1,3}( \w{1,3})+")

Prefix = tuple[str, ...]
ClaimOf = Callable[[Prediction, Prefix], Claim | None]


@dataclass(frozen=True, slots=True)
class Setting:
    """A request's parameter for a prompt, and the claim that it makes of the next token after each prefix."""

    prompt: OpenPrompt
    name: str
    value: Any
    claim_of: ClaimOf

    @property
    def claim(self) -> Claim | None:
        """The claim of the first token."""
        return self.claim_of(self.prompt.first, ())

    @property
    def effect(self) -> float:
        return 0.0 if self.claim is None else self.claim.effect

    @property
    def text(self) -> str:
        return f"{self.name} {self.value} after {self.prompt.text!r}"


async def temperature_one(audit: Audit, trial: Trial) -> None:
    """Draw from the four prompts that show a shift of the likeliest token best."""
    prompts = audit.open_prompts(4)
    part = trial.add(DrawEvidence())
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


async def first_tokens(audit: Audit, trial: Trial, name: str) -> None:
    """Draw first tokens with the value of a parameter whose loss would show best."""
    setting = await _setting(audit, name)
    part, claim = trial.add(DrawEvidence(1)), setting.claim
    trial.sentence = setting.text
    while not (trial.is_found() or (trial.is_enough() and trial.num_draws >= _LEAST_DRAWS)):
        num_before = part.num_draws
        await add_first_draws(trial, part, audit.server, setting.prompt.text, claim, {name: setting.value})
        if part.num_draws == num_before:
            raise NoVerdictError(f"no draw with {setting.text} is among the reported tokens")


async def later_parameters(audit: Audit, trial: Trial) -> None:
    """Draw texts with each parameter, and weigh their tokens 2 to 4, where drafts decide."""
    names = ("temperature", *_FILTERS, "logit_bias")
    parts = {name: trial.add(LeastEvidence(1)) for name in names}
    shown, reason = [], ""
    for name, part in parts.items():
        try:
            setting = await _setting(audit, name)
            await _draw_paths(audit.server, trial, part, setting, [setting.claim_of], is_first=False)
            shown.append(f"{name} {setting.value}")
        except NoVerdictError as error:
            if audit.server.budget.end or part.num_draws:
                raise
            trial.drop(part)
            reason = f"{name}: {error}"
    if not shown:
        raise NoVerdictError(reason)
    trial.sentence = ", ".join(shown)


async def presence_penalty(audit: Audit, trial: Trial) -> None:
    """Draw the next tokens under a penalty of tokens that occur."""
    await _penalized(audit, trial, "presence_penalty", lambda count: float(count > 0))


async def frequency_penalty(audit: Audit, trial: Trial) -> None:
    """Draw the next tokens under a penalty of each occurrence."""
    await _penalized(audit, trial, "frequency_penalty", float)


async def _penalized(audit: Audit, trial: Trial, name: str, penalty: Callable[[int], float]) -> None:
    """Draw short texts that repeat their own tokens, under a parameter of 1.0.

    Servers differ in whether the prompt's tokens count. A finding needs both readings to be refuted.
    """
    prompt = await _most_repeating(audit)
    trial.sentence = f"{name} 1.0 after {prompt.text!r}"

    def claim_of(plain: Prediction, prefix: Prefix, in_prompt: Callable[[str], int]) -> Claim | None:
        return weighted_claim(plain, lambda token, prob: math.exp(-penalty(prefix.count(token) + in_prompt(token))))

    words = Counter(re.findall(r" ?\w+", prompt.text))
    readings = [partial(claim_of, in_prompt=count) for count in (lambda token: 0, words.__getitem__)]
    setting = Setting(prompt, name, 1.0, readings[0])
    await _draw_paths(audit.server, trial, trial.add(LeastEvidence(2)), setting, readings, is_first=True)


async def _setting(audit: Audit, name: str) -> Setting:
    """Return the prompt and value of a parameter whose loss would show best at the first token.

    Raises:
        NoVerdictError: it would show at no prompt.
    """
    prompts = audit.open_prompts(99)
    if name == "logit_bias":
        return await _biased(audit.server, prompts[0])
    found = [setting for prompt in prompts for setting in _settings(prompt, name)]
    best = max(found, key=lambda setting: setting.effect, default=None)
    if best is None or best.effect < 2e-3:  # nats per draw; below it, the draws would be too many
        raise NoVerdictError("no prompt's distribution would show the parameter")
    return best


def _settings(prompt: OpenPrompt, name: str) -> Iterator[Setting]:
    """Yield a filter's values that remove enough; one token alone would be greedy decoding."""
    probs = prompt.first.probs
    if name == "temperature":
        if sum(probs) > 0.5:
            yield Setting(prompt, name, 0.7, lambda plain, prefix: tempered(plain, 0.7))
        return
    for number in range(1, len(probs)):
        value = {
            "top_p": round(sum(probs[:number]) - probs[number - 1] / 2, 4),
            "top_k": number,
            "min_p": round(math.sqrt(probs[number] * probs[number - 1]) / probs[0], 4),
        }[name]
        if value == 0.0:  # rounded: a min_p so small removes nothing
            continue
        setting = Setting(prompt, name, value, partial(_filtered, name=name, value=value))
        share_removed = 1 - sum(probs[:number])
        if setting.claim is not None and len(setting.claim.cells) > 1 and share_removed > 0.15:
            yield setting


def _filtered(plain: Prediction, prefix: Prefix, name: str, value: float) -> Claim | None:
    """The tokens that a filter keeps; None if rounding may change their number."""
    probs = plain.probs
    margin = 0.03  # from the filter's bound to the nearest token: rounding does not cross it
    if name == "top_k":
        number = int(value)
        is_near = number >= len(probs) or probs[number] * (1 + 4 * margin) > probs[number - 1]
    elif name == "min_p":
        number = sum(prob >= value * probs[0] for prob in probs)
        is_near = any(abs(math.log(max(prob, 1e-9) / (value * probs[0]))) < 3 * margin for prob in probs)
    else:
        sums = list(accumulate(probs))
        number = 1 + sum(total < value for total in sums)
        is_near = any(abs(total - value) < margin for total in sums)
    return None if is_near or number >= len(probs) else filtered(plain, number)


async def _biased(server: Server, prompt: OpenPrompt) -> Setting:
    """Bias the likeliest token down. Its id is in vLLM's `return_token_ids` or llama-server's logprobs.

    Raises:
        NoVerdictError: the server does not show ids.
    """
    token, _ = prompt.first.named[0]
    answer = await server.ask(prompt.text, max_tokens=1, temperature=0.0, logprobs=server.num_top)
    choice = answer.data["choices"][0]
    content = (choice.get("logprobs") or {}).get("content") or [{}]
    found: Any = (choice.get("token_ids") or [content[0].get("id")])[0]
    if first_token(answer.choices[0]) != token or not isinstance(found, int):
        raise NoVerdictError("the server does not show token ids, which logit_bias needs")

    bias = -2.0

    def claim_of(plain: Prediction, prefix: Prefix) -> Claim | None:
        return weighted_claim(plain, lambda each, prob: math.exp(bias) if each == token else 1.0)

    return Setting(prompt, "logit_bias", {str(found): bias}, claim_of)


async def _draw_paths(
    server: Server, trial: Trial, part: LeastEvidence, setting: Setting, readings: Sequence[ClaimOf], *, is_first: bool
) -> None:
    """Draw short texts, and weigh the tokens after the most frequent prefixes, by each reading of the claim.

    `is_first` is True if the first tokens count too.

    Raises:
        NoVerdictError: no prefix can be given, or none shows the parameter.
    """
    fields = {"max_tokens": _PATH, "logprobs": 1, "n": server.max_choices, setting.name: setting.value}
    plain: dict[Prefix, Prediction] = {}
    while not trial.is_enough(part):
        answers: list[Answer] = []
        while sum(len(answer.choices) for answer in answers) < _LEAST_DRAWS:
            answers += await all_of(server.ask(setting.prompt.text, **fields) for _ in range(server.width))
        if not plain:
            plain = await _after_prefixes(server, setting.prompt, answers)
            if not plain:
                raise NoVerdictError("the server shows no token ids, and no prefix of words can be given")
            plain |= {(): setting.prompt.first} if is_first else {}
        for answer in answers:
            for prefix, prediction in plain.items():
                _weigh(trial, part, answer, prefix, [claim_of(prediction, prefix) for claim_of in readings])
        if not part.num_draws or part.num_needed(trial.part_threshold) > 50_000:  # its loss would hardly show
            raise NoVerdictError("no prefix's distribution would show the parameter")


async def _after_prefixes(server: Server, prompt: OpenPrompt, answers: Sequence[Answer]) -> dict[Prefix, Prediction]:
    """Return the plain distributions after the most frequent beginnings of answers."""
    choices = [choice for answer in answers for choice in answer.choices]
    prefixes = Counter(each.tokens[:length] for each in choices for length in range(1, min(_PATH, len(each.tokens))))
    plain: dict[Prefix, Prediction] = {}
    for prefix, _ in prefixes.most_common(24):
        choice = next(each for each in choices if each.tokens[: len(prefix)] == prefix)
        if (prediction := await server.forced(prompt.text, choice, len(prefix))) is not None:
            plain[prefix] = prediction
    return plain


def _weigh(trial: Trial, part: LeastEvidence, answer: Answer, prefix: Prefix, claims: Sequence[Claim | None]) -> None:
    """Add the tokens after a prefix by each reading."""
    drawn: Counter[str | None] = Counter(
        each.tokens[len(prefix)]
        for each in answer.choices
        if each.tokens[: len(prefix)] == prefix and len(each.tokens) > len(prefix)
    )
    before = part.log_evidence
    for reading, claim in zip(part.parts, claims, strict=True):
        if claim is not None and claim.ignored is not None and drawn:
            reading.add(claim.probs, claim.counts(drawn), (claim.ignored,))
    if claims[0] is not None:
        seen = ", ".join(f"{token!r} {count}" for token, count in drawn.most_common(8))
        trial.show(part.log_evidence - before, answer, claims[0], f"after {''.join(prefix)!r}: {seen}")


async def _most_repeating(audit: Audit) -> OpenPrompt:
    """Return the prompt of short words, each a token, with the most probable repetition of its likeliest token."""

    async def share(prompt: OpenPrompt) -> float:
        answer = await audit.server.ask(prompt.text, max_tokens=1, temperature=0.0, logprobs=1)
        if not answer.choices[0].tokens:
            return 0.0
        after = await audit.server.forced(prompt.text, answer.choices[0], 1)
        token, prob = prompt.first.named[0]
        return 0.0 if after is None else prob * dict(after.named).get(token, 0.0)

    prompts = [each for each in audit.open_prompts(99) if _SHORT_WORDS.fullmatch(each.text)]
    shares = await all_of(share(prompt) for prompt in prompts)
    if max(shares, default=0.0) < 0.02:  # share of texts that begin with a token twice
        raise NoVerdictError("no prompt makes the model repeat a token")
    return prompts[shares.index(max(shares))]
