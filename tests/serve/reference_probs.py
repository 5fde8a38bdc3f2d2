"""The exact distribution of a target's first tokens, by enumeration in float64 and without any of the engine's code."""

from __future__ import annotations

import math
from collections import Counter

import torch
from torch import Tensor
from transformers import PreTrainedModel

from protos.messages import SamplingParams


@torch.inference_mode()
def probs_of_first_tokens(
    model: PreTrainedModel, prompt: list[int], sampling: SamplingParams, num_tokens: int, num_stale: int = 0
) -> Tensor:
    """Probability of every sequence of tokens, `[V ** num_tokens] float64`, the first token most significant.

    With `num_stale` the penalties overlook that many of the latest tokens: the distribution of a famous bug, for tests
    of power.
    """
    probs = torch.ones(1, dtype=torch.float64)
    prefixes: list[list[int]] = [[]]
    for _ in range(num_tokens):
        logits = model(torch.tensor([prompt + prefix for prefix in prefixes])).logits[:, -1].double()
        seen = [prefix[: max(0, len(prefix) - num_stale)] for prefix in prefixes]
        steps = torch.stack([next_probs(row, prompt, ids, sampling) for row, ids in zip(logits, seen, strict=True)])
        probs = (probs[:, None] * steps).flatten()
        prefixes = [[*prefix, token_id] for prefix in prefixes for token_id in range(logits.shape[1])]
    return probs


def next_probs(logits: Tensor, prompt: list[int], generated: list[int], sampling: SamplingParams) -> Tensor:
    """One step, written as the documentation of each parameter reads: `[V]` -> `[V]`."""
    scores = logits.clone()
    counts = Counter(generated)
    for token_id in range(len(scores)):
        if counts[token_id] or token_id in prompt:
            score = scores[token_id]
            scores[token_id] = score / sampling.repetition_penalty if score > 0 else score * sampling.repetition_penalty
        scores[token_id] -= sampling.frequency_penalty * counts[token_id]
        scores[token_id] -= sampling.presence_penalty * bool(counts[token_id])
    for token_id, bias in sampling.logit_bias:
        scores[token_id] += bias
    if len(generated) < sampling.min_tokens:
        scores[list(sampling.stop_token_ids)] = -math.inf
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(scores.argmax(), len(scores)).double()
    probs = (scores / sampling.temperature).softmax(0)
    if sampling.top_k:
        probs = _keep(probs, probs >= probs.sort(descending=True).values[sampling.top_k - 1])
    if sampling.top_p < 1:
        ordered = probs.sort(descending=True).values
        num_kept = int((ordered.cumsum(0) < sampling.top_p).sum()) + 1
        probs = _keep(probs, probs >= ordered[num_kept - 1])
    return _keep(probs, probs >= sampling.min_p * probs.max())


def _keep(probs: Tensor, is_kept: Tensor) -> Tensor:
    return torch.where(is_kept, probs, 0.0) / probs[is_kept].sum()
