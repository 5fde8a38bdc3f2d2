"""The worth of a draft on logged positions: the tokens of a pass that it would have made possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from engine.stats.position_log.shard import LoggedRequest
from models.training.rollout import penalise
from models.tuning.log_windows import Window, known_ids, read_batch, windows_of
from protos.messages import GREEDY_BELOW


@dataclass(frozen=True, slots=True)
class Score:
    """Mean acceptance of a draft's token behind the target's own text, and expected tokens of a pass with K drafts."""

    num_positions: int
    acceptance: float
    tokens_per_pass: float


@torch.no_grad()
def score_draft(model: nn.Module, requests: Sequence[LoggedRequest], num_tokens: int) -> Score:
    """Measure a draft with K = `num_tokens` on positions that it was not trained on.

    A greedy request's draft stands if it is the token that the target chose, a sampled one's with probability
    sum of min(p, q), 1 - TV (arXiv:2211.17192, corollary 3.6), at the request's temperature.
    """
    was_training = model.training
    model.eval()
    chances: list[float] = []
    num_passes = 0.0
    for request in requests:
        found = [chance for window in windows_of(request) for chance in _acceptance(model, request, window)]
        for run in _unbroken(found, request.positions.tolist()):
            num_passes += expected_passes(run, num_tokens)
        chances += found
    model.train(was_training)
    return Score(len(chances), sum(chances) / len(chances), len(chances) / num_passes)


def expected_passes(chances: Sequence[float], num_tokens: int) -> float:
    """Return the expected passes of a decoder with K drafts along a text, given each draft's chance to stand.

    A pass begins behind the last one's accepted drafts and its recovered or bonus token.
    """
    begins = [1.0, *[0.0] * (len(chances) + num_tokens)]
    for place in range(len(chances)):
        reaches = begins[place]
        for length in range(num_tokens):
            stands = chances[place + length] if place + length < len(chances) else 0.0
            begins[place + length + 1] += reaches * (1.0 - stands)
            reaches *= stands
        begins[min(place + num_tokens + 1, len(begins) - 1)] += reaches
    return sum(begins[: len(chances)])


def _acceptance(model: nn.Module, request: LoggedRequest, window: Window) -> list[float]:
    logits = read_batch(model, [window]).float().cpu()  # [N, V]
    if request.temperature < GREEDY_BELOW:
        return (_greedy_ids(logits, request, window) == window.chosen_ids).float().tolist()
    q = (logits / request.temperature).softmax(-1).gather(1, known_ids(window.top_ids, logits.shape[1]))  # [N, k]
    p = _at_temperature(window.top_logprobs.float(), request.temperature)
    return torch.minimum(p, q).sum(-1).tolist()


def _greedy_ids(logits: Tensor, request: LoggedRequest, window: Window) -> Tensor:
    if request.repetition_penalty != 1.0:
        first = window.token_ids
        seen = [first[: row + 1][None] for row in window.rows.tolist()]
        rows = zip(logits, seen, strict=True)
        logits = torch.cat([penalise(row[None], ids, request.repetition_penalty) for row, ids in rows])
    return logits.argmax(-1)


def _at_temperature(top_logprobs: Tensor, temperature: float) -> Tensor:
    """Return the probabilities of the likeliest tokens; the others are nothing but at temperature 1."""
    return top_logprobs.exp() if temperature == 1.0 else (top_logprobs / temperature).softmax(-1)


def _unbroken(chances: Sequence[float], positions: Sequence[int]) -> Iterator[list[float]]:
    """Yield the chances of positions that follow each other."""
    breaks = [index + 1 for index, (left, right) in enumerate(pairwise(positions)) if right != left + 1]
    for begin, end in pairwise([0, *breaks, len(positions)]):
        yield list(chances[begin:end])
