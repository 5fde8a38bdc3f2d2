"""Coupled verification: run the ordinary sampler at every row and accept drafts while they are what it sampled.

The output is a function of prefix, seed and target logits, whatever the draft does: each emitted token is the one
plain decoding would have sampled at that position with that noise (Daliri, Musco, Suresh, arXiv:2408.07978).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from engine.sampling.sampler import Sampler
from engine.verifier.trial import Outcome, Trial


def verify_coupled(sampler: Sampler, scores: Tensor, trials: Seq[Trial]) -> list[Outcome]:
    """One outcome per trial; `scores [R, V]` are processed and lie in the order of the trials' rows."""
    sampled_ids = iter(sampler.sample(scores, [row for trial in trials for row in trial.rows]).tolist())
    return [match([next(sampled_ids) for _ in trial.rows], trial.draft_ids) for trial in trials]


def match(sampled_ids: Seq[int], draft_ids: Seq[int]) -> Outcome:
    """Emit what was sampled, up to and with the first token that is not its draft, or the bonus.

    A row after the first difference was computed on a wrong prefix, so nothing of it is looked at.
    """
    num_accepted = 0
    for sampled_id, draft_id in zip(sampled_ids, draft_ids, strict=False):
        if sampled_id != draft_id:
            break
        num_accepted += 1
    return Outcome(tuple(sampled_ids[: num_accepted + 1]), num_accepted)
