"""The score of a draft on logged positions: the expected tokens of a pass with it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaForCausalLM

from engine.position_log.shard import LoggedRequest
from protos.messages import GREEDY_BELOW
from tuning.log_windows import Window, windows_of
from tuning.student import Student


def gumbel_noise(num_sequences: int, vocab_size: int, seed: int, position: int) -> Tensor:
    """Return the noise [B, V] of one position, a pure function of (seed, position): draft and target draw the same."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + position)
    uniform = torch.rand(num_sequences, vocab_size, generator=generator).clamp(1e-9, 1.0 - 1e-7)
    return -torch.log(-torch.log(uniform))


def choose(logits: Tensor, temperature: float, seed: int, position: int) -> Tensor:
    """Return tokens [B] sampled from logits [B, V] at `position`: argmax(logits / temperature + noise)."""
    if temperature == 0.0:
        return logits.argmax(-1)
    num_sequences, vocab_size = logits.shape
    noise = gumbel_noise(num_sequences, vocab_size, seed, position).to(logits.device)
    return (logits / temperature + noise).argmax(-1)


def penalise(logits: Tensor, ids: Tensor, penalty: float) -> Tensor:
    """Divide the logits [B, V] of the tokens in `ids` [B, S] by the penalty, or multiply them where negative."""
    seen = logits.gather(1, ids)
    return logits.scatter(1, ids, torch.where(seen > 0, seen / penalty, seen * penalty))


@torch.no_grad()
def generate(
    model: LlamaForCausalLM,
    prompts: Tensor,
    num_tokens: int,
    temperature: float,
    seed: int,
    repetition_penalty: float = 1.0,
) -> Tensor:
    """Prompts [B, S] with the model's continuations [B, S + num_tokens]; an end of text does not stop it."""
    cache, ids, inputs = DynamicCache(config=model.config), prompts, prompts
    for position in range(prompts.shape[1], prompts.shape[1] + num_tokens):
        logits = model(inputs, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1].float()  # [B, V]
        inputs = choose(penalise(logits, ids, repetition_penalty), temperature, seed, position).unsqueeze(1)  # [B, 1]
        ids = torch.cat([ids, inputs], dim=1)
    return ids


@dataclass(frozen=True, slots=True)
class Score:
    """Mean acceptance of a first draft after the target's own text, and expected tokens of a pass with K drafts."""

    num_positions: int
    acceptance: float
    tokens_per_pass: float


@torch.no_grad()
def score_draft(student: Student, requests: Sequence[LoggedRequest], num_tokens: int) -> Score:
    """Measure a draft with K = `num_tokens`, or its largest K, on held-out positions.

    A greedy request's draft is accepted if the target chose it, a sampled one's with probability
    sum of min(p, q), 1 - TV (arXiv:2211.17192, corollary 3.6), at the request's temperature.
    """
    model, num_drafts = student.model, min(num_tokens, student.max_drafts)
    was_training = model.training
    model.eval()
    num_positions, num_accepted, num_passes = 0, 0.0, 0.0
    for request in requests:
        found = _chances(student, request, num_drafts)  # [K, N]
        num_positions, num_accepted = num_positions + found.shape[1], num_accepted + float(found[0].sum())
        for begin, end in _unbroken(request.positions.tolist()):
            num_passes += expected_passes(found[:, begin:end].tolist())
    model.train(was_training)
    return Score(num_positions, num_accepted / num_positions, num_positions / num_passes)


def expected_passes(chances: Sequence[Sequence[float]]) -> float:
    """Return the expected passes of a decoder with K drafts along a text; `chances[j][i]` is for draft j at token i.

    A pass begins after the previous one's accepted drafts and its recovered or bonus token. Draft j of a pass that
    begins at i is for token i + j; its chance assumes that all earlier drafts were accepted.
    """
    num_drafts, num_places = len(chances), len(chances[0])
    begins = [1.0, *[0.0] * (num_places + num_drafts)]
    for place in range(num_places):
        reaches = begins[place]
        for length in range(num_drafts):
            chance = chances[length][place + length] if place + length < num_places else 0.0
            begins[place + length + 1] += reaches * (1.0 - chance)
            reaches *= chance
        begins[min(place + num_drafts + 1, len(begins) - 1)] += reaches
    return sum(begins[:num_places])


def _chances(student: Student, request: LoggedRequest, num_drafts: int) -> Tensor:
    """Return the chance of acceptance of each draft of a round at each position of a request, [K, N]."""
    found = []
    for window in windows_of(request):
        logits = student.logits([window], student.num_unlike(num_drafts))
        rows = torch.stack([_acceptance(student, each.float().cpu(), request, window) for each in logits])
        found.append(rows.expand(num_drafts, -1))
    return torch.cat(found, dim=1)


def _acceptance(student: Student, logits: Tensor, request: LoggedRequest, window: Window) -> Tensor:
    """Return the chances of acceptance [N] for a draft's logits [N, D]."""
    if request.temperature < GREEDY_BELOW:
        ids = student.target_ids(_penalised(student, logits, request, window).argmax(-1))
        return (ids == window.chosen_ids).float()
    top_ids = student.draft_ids(window.top_ids)  # [N, k]
    q = (logits / request.temperature).softmax(-1).gather(1, top_ids.clamp(min=0)) * (top_ids >= 0)
    p = _at_temperature(window.top_logprobs.float(), request.temperature)
    return torch.minimum(p, q).sum(-1)


def _penalised(student: Student, logits: Tensor, request: LoggedRequest, window: Window) -> Tensor:
    if request.repetition_penalty == 1.0:
        return logits
    ids = student.draft_ids(window.token_ids)
    rows = zip(logits, window.rows.tolist(), strict=True)
    return torch.cat([penalise(each[None], _known(ids[: row + 1]), request.repetition_penalty) for each, row in rows])


def _known(ids: Tensor) -> Tensor:
    return ids[ids >= 0][None]


def _at_temperature(top_logprobs: Tensor, temperature: float) -> Tensor:
    """Return the probabilities of the likeliest tokens; only at temperature 1 do the others count."""
    return top_logprobs.exp() if temperature == 1.0 else (top_logprobs / temperature).softmax(-1)


def _unbroken(positions: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each run of consecutive positions."""
    breaks = [index + 1 for index, (left, right) in enumerate(pairwise(positions)) if right != left + 1]
    yield from pairwise([0, *breaks, len(positions)])
