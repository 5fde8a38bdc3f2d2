"""The losses of drafts and targets; the demo pair's lessons compile theirs into one pass over the logits."""

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST = 1e-5  # a lower bound for unknown probabilities
_NEVER = -40.0  # the logarithm of a probability of 0


def next_token_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of hidden [B, T, hidden] against labels [B, T]."""
    logits = F.linear(hidden, head).float()  # [B, T, V]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def distillation_loss(hidden: Tensor, head: Tensor, target_logits: Tensor, l1_weight: float) -> Tensor:
    """KL(p || q) plus `l1_weight` times |p - q|_1 / 2, the chance of a rejection (arXiv:2211.17192, corollary 3.6)."""
    log_q = F.log_softmax(F.linear(hidden, head).float(), dim=-1)  # [B, T, V]
    return _divergence(F.log_softmax(target_logits.float(), dim=-1), log_q, l1_weight).mean()


def top_distillation_loss(logits: Tensor, top_ids: Tensor, top_logprobs: Tensor, l1_weight: float) -> Tensor:
    """`distillation_loss` if only the likeliest tokens of p are known: all others count as one token.

    Without the tokens that the draft lacks, p is renormalized, and a row's weight is the remaining mass.

    Args:
        logits: of the draft, [N, V].
        top_ids: [N, k] int64, -1 for tokens that the draft lacks.
        top_logprobs: log p of these tokens, [N, k].
        l1_weight: as of `distillation_loss`.
    """
    is_unknown = top_ids < 0
    log_q = F.log_softmax(logits.float(), dim=-1).gather(1, top_ids.clamp(min=0))  # [N, k]
    missing = (top_logprobs.exp() * is_unknown).sum(-1).clamp(max=1.0 - _LEAST)  # [N]
    log_p = top_logprobs - torch.log1p(-missing)[:, None]
    log_p, log_q = (_with_rest(each.masked_fill(is_unknown, _NEVER)) for each in (log_p, log_q))
    return ((1.0 - missing) * _divergence(log_p, log_q, l1_weight)).mean()


def _with_rest(logprobs: Tensor) -> Tensor:
    """Append the log-probability of all other tokens to [N, k]: [N, k + 1]."""
    total = logprobs.exp().sum(-1, keepdim=True).clamp(max=1.0 - _LEAST)  # float16 rounds p to more than 1
    return torch.cat([logprobs, torch.log1p(-total)], dim=-1)


def _divergence(log_p: Tensor, log_q: Tensor, l1_weight: float) -> Tensor:
    """[..., k] to the loss of each row, [...]."""
    p = log_p.exp()
    divergence = (p * (log_p - log_q)).sum(-1)
    rejection = (p - log_q.exp()).abs().sum(-1) / 2
    return divergence + l1_weight * rejection
