"""The two losses of the pair; their users compile each into one pass over the logits."""

import torch.nn.functional as F
from torch import Tensor


def next_token_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of hidden [B, T, hidden] against labels [B, T]."""
    logits = F.linear(hidden, head).float()  # [B, T, V]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def distillation_loss(hidden: Tensor, head: Tensor, target_logits: Tensor, l1_weight: float) -> Tensor:
    """KL(p || q) plus `l1_weight` times |p - q|_1 / 2, the chance of a rejection (arXiv:2211.17192, corollary 3.6)."""
    log_q = F.log_softmax(F.linear(hidden, head).float(), dim=-1)  # [B, T, V]
    log_p = F.log_softmax(target_logits.float(), dim=-1)  # [B, T, V]
    p = log_p.exp()
    divergence = (p * (log_p - log_q)).sum(-1).mean()
    rejection = (p - log_q.exp()).abs().sum(-1).mean() / 2
    return divergence + l1_weight * rejection
