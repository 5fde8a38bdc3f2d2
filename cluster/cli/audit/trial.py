"""One check's way to a verdict, and the prompts, servers and draws that the checks share."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np

from cluster.cli.audit.client import Server
from cluster.cli.audit.evidence import (
    Claim,
    DrawEvidence,
    Evidence,
    HitEvidence,
    Prediction,
    plain_claim,
)
from cluster.cli.audit.wire import Answer, Choice, NoVerdictError, Request

_T = TypeVar("_T")
_Part = TypeVar("_Part", bound=Evidence)


class CheckVerdict(StrEnum):
    """The conclusion of a check."""

    HOLDS = "holds"
    FOUND = "found"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, slots=True)
class Finding:
    """The request that shows a fault best, the expected answer, and the answer that came."""

    request: Request
    expected: str
    seen: str


class Trial:
    """The evidence of one check; parts are averaged, so that a fault in one of them is found."""

    def __init__(self, log_threshold: float) -> None:
        self._log_threshold = log_threshold
        self._parts: list[Evidence] = []
        self._planned: list[Evidence] = []
        self._best = 0.0
        self._worst = 0.0
        self.finding: Finding | None = None
        self.sentence = ""

    def add(self, part: _Part, *, is_planned: bool = True) -> _Part:
        """Add a part, and return it; without `is_planned` the audit plans no number of its draws."""
        self._parts.append(part)
        if is_planned:
            self._planned.append(part)
        return part

    def drop(self, part: Evidence) -> None:
        """Remove a part from the plan, since it cannot have draws."""
        self._planned.remove(part)

    def hit(self, part: HitEvidence, answer: Answer, expected: str, seen: str | None) -> None:
        """Count an answer; `seen` is the impossible outcome, None if it is as expected."""
        part.add(seen is not None)
        if seen is not None and (self.finding is None or part.num_hits == 1):
            self.finding = Finding(answer.request, expected, seen)

    def show(self, gained: float, answer: Answer, claim: Claim, seen: str) -> None:
        """Remember the answer with the most evidence."""
        if gained > self._worst:
            self._worst = gained
            expected = ", ".join(f"{token!r} {claim.probs[cell]:.1%}" for token, cell in list(claim.cells.items())[:8])
            self.finding = Finding(answer.request, expected, seen)

    @property
    def num_draws(self) -> int:
        return sum(part.num_draws for part in self._planned)

    @property
    def num_needed(self) -> int:
        """Draws needed for the stated power."""
        return sum(part.num_needed(self.part_threshold) for part in self._planned)

    @property
    def p_value(self) -> float:
        """The greatest evidence so far as a p-value."""
        return min(1.0, math.exp(-max(self._best, self.log_evidence)))

    @property
    def log_evidence(self) -> float:
        logs = np.asarray([part.log_evidence for part in self._parts] or [0.0])
        return float(logs.max() + math.log(np.exp(logs - logs.max()).mean()))

    @property
    def part_threshold(self) -> float:
        """The logarithm of the evidence that one part must have by itself."""
        return self._log_threshold + math.log(max(1, len(self._parts)))

    def is_found(self) -> bool:
        """True once the evidence suffices."""
        self._best = max(self._best, self.log_evidence)
        return self._best >= self._log_threshold

    def is_enough(self, part: Evidence | None = None) -> bool:
        """True if a fault is found, or would have been with the stated power, in one part or in each."""
        parts = self._planned if part is None else [part]
        return self.is_found() or all(each.is_enough(self.part_threshold) for each in parts)


NUM_POSITIONS = 8

# Texts whose next token is open, and texts that repeat themselves, where a model repeats its own token.
PROMPTS = (
    "The weather today is",
    "def add(a, b):\n    return",
    "My favourite colour is",
    "import os\nimport",
    "Once upon a time there was a",
    "for i in range(",
    "The answer to the question is",
    "She opened the door and saw",
    "class Node:\n    def __init__(self,",
    "I went to the market to buy some",
    "if x is None:\n    raise",
    "A list of animals: cat, dog,",
    "The best thing about the city is the",
    "with open(path) as file:\n    for line in",
    "We do not know whether",
    "1, 2, 3, 4,",
    "no no no no no",
    "a b a b a b a",
    "ha ha ha ha",
    "yes yes yes yes yes",
    "Dear Sir or Madam,\n\nI am writing to",
    "self.name = name\n        self.",
    "The train leaves at",
    "It is clear that the",
)


@dataclass(frozen=True, slots=True)
class OpenPrompt:
    """A prompt with the reported distribution of its first token."""

    text: str
    first: Prediction

    @property
    def openness(self) -> float:
        """The variance of the top token: the larger it is, the more a draw shows."""
        top = self.first.named[0][1] if self.first.named else 0.0
        return top * (1 - top)


@dataclass(slots=True)
class Audit:
    """The server, another one to compare it with, and the prompts with their distributions."""

    server: Server
    other: Server | None
    prompts: list[OpenPrompt] = field(default_factory=list)
    why_no_prompts: str = ""
    plain: Server | None = None  # the server without drafts, once a request is known that turns them off

    def open_prompts(self, number: int) -> list[OpenPrompt]:
        """Return the `number` prompts with the most open first tokens.

        Raises:
            NoVerdictError: the server reports no distributions.
        """
        if not self.prompts:
            raise NoVerdictError(self.why_no_prompts)
        return sorted(self.prompts, key=lambda prompt: -prompt.openness)[:number]


async def all_of(calls: Iterable[Awaitable[_T]]) -> list[_T]:
    """Await calls together; the first error is raised once all have ended."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def add_first_draws(
    trial: Trial, part: DrawEvidence, server: Server, text: str, claim: Claim | None, params: dict[str, Any]
) -> None:
    """Draw first tokens with several requests at once; without `claim` each answer reports its own distribution."""
    logprobs = server.num_drawn if claim is None else 1
    fields = {"max_tokens": 1, "logprobs": logprobs, "n": server.max_choices, **params}
    for answer in await all_of(server.ask(text, **fields) for _ in range(server.width)):
        first = answer.first_prediction
        own = claim if claim is not None or first is None else plain_claim(first)
        if own is None:
            continue
        drawn = Counter(first_token(choice) for choice in answer.choices)
        before = part.log_evidence
        part.add(own.probs, own.counts(drawn), () if own.ignored is None else (own.ignored,))
        seen = ", ".join(f"{token!r} {count}" for token, count in drawn.most_common(NUM_POSITIONS))
        trial.show(part.log_evidence - before, answer, own, seen)


def first_token(choice: Choice) -> str | None:
    """Return the drawn token; None if the choice ended at once."""
    return choice.tokens[0] if choice.tokens else choice.text or None


def add_path_draws(
    trial: Trial, part: DrawEvidence, answer: Answer, seen: dict[tuple[str, ...], str], first: int = 0
) -> None:
    """Add the tokens of an answer from position `first` on, each by the distribution reported with it.

    `seen` has the last token after each prefix.
    """
    prompt = str(answer.request.body.get("prompt") or answer.request.body.get("messages"))
    before, least = part.log_evidence, 1.0
    rarest: tuple[Claim, str] | None = None
    for choice in answer.choices:
        for position in range(first, len(choice.predictions)):
            token, prefix = choice.tokens[position], (prompt, *choice.tokens[:position])
            claim = plain_claim(choice.predictions[position])
            cell = None if claim is None else claim.cell(token)
            if claim is None or cell is None:
                continue
            part.add(claim.probs, claim.counts({token: 1}), sticky=claim.cell(seen.get(prefix)))
            seen[prefix] = token
            if claim.probs[cell] < least:
                least = float(claim.probs[cell])
                rarest = claim, f"token {position + 1} of a choice is {token!r}, in the text {choice.text!r}"
    if rarest is not None:
        trial.show(part.log_evidence - before, answer, *rarest)
