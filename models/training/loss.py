"""The losses of drafts and targets; the demo pair's lessons compile theirs into one pass over the logits."""

import torch
import torch.nn.functional as F
from torch import Tensor


def next_token_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of hidden [B, T, hidden] against labels [B, T]."""
    logits = F.linear(hidden, head).float()  # [B, T, V]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def distillation_loss(hidden: Tensor, head: Tensor, target_logits: Tensor, l1_weight: float) -> Tensor:
    """KL(p || q) plus `l1_weight` times |p - q|_1 / 2, the chance of a rejection (arXiv:2211.17192, corollary 3.6)."""
    log_q = F.log_softmax(F.linear(hidden, head).float(), dim=-1)  # [B, T, V]
    return _divergence(F.log_softmax(target_logits.float(), dim=-1), log_q, l1_weight)


def top_distillation_loss(logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, l1_weight: float) -> Tensor:
    """`distillation_loss` where of p only the likeliest tokens are known: all others count as one.

    Args:
        logits: of the draft, [N, V].
        top_ids: [N, k] int64.
        top_logprobs: log p of these, [N, k].
        l1_weight: as of `distillation_loss`.
    """
    log_q = F.log_softmax(logits.float(), dim=-1).gather(1, top_ids)  # [N, k]
    return _divergence(_with_rest(top_logprobs), _with_rest(log_q), l1_weight)


def _with_rest(logprobs: Tensor) -> Tensor:
    """Return log-probabilities [N, k] and that of anything else, [N, k + 1]."""
    total = logprobs.exp().sum(-1, keepdim=True).clamp(max=1.0 - 1e-5)  # float16 rounds p to more than 1
    return torch.cat([logprobs, torch.log1p(-total)], dim=-1)


def _divergence(log_p: Tensor, log_q: Tensor, l1_weight: float) -> Tensor:
    p = log_p.exp()
    divergence = (p * (log_p - log_q)).sum(-1).mean()
    rejection = (p - log_q.exp()).abs().sum(-1).mean() / 2
    return divergence + l1_weight * rejection
