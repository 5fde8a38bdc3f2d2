"""Drafts in the making: one growing chain of tokens per sequence, and how the next token of all of them is chosen."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.draft import Draft, SparseLaw
from engine.proposer.mirror import Mirror
from engine.row import Row
from engine.sampler import Sampler
from protos.messages import VerifyMode

_LAW_SIZE = 32  # of T=1 drafts, laws of 8, 32 and 128 tokens accept 63, 68 and 71% in a synthetic study


class Chain:
    """The draft of one sequence while it grows. `row` sees `token_ids` grow: it always stands for the next token."""

    def __init__(self, mirror: Mirror, num_wanted: int) -> None:
        sequence = mirror.sequence
        self.mirror = mirror
        self.num_wanted = num_wanted
        self.token_ids: list[int] = []
        self.laws: list[SparseLaw] = []
        self.row = Row(
            sequence.sampling,
            sequence.token_ids,
            sequence.num_prompt_tokens,
            sequence.request.sample_index,
            self.token_ids,
        )

    @property
    def num_left(self) -> int:
        return self.num_wanted - len(self.token_ids)

    @property
    def is_coupled(self) -> bool:
        return self.mirror.sequence.verify is VerifyMode.COUPLED

    def draft(self) -> Draft:
        return Draft(tuple(self.token_ids), tuple(self.laws))


class ChainSampler:
    """Chooses drafts with the sampler that the target verifies them with."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def extend(self, chains: Seq[Chain], logits: Tensor) -> Tensor:
        """Append one token to each chain and return them, [B] int64; `logits` are [B, V] float32.

        Chains for coupled verification pick with the noise the target will use; all others are drawn from a
        sparse law that goes along, with noise of their own.
        """
        rows = [chain.row for chain in chains]
        scores = self._sampler.process(logits, rows)
        if all(chain.is_coupled for chain in chains):
            picked = self._sampler.pick(scores, rows)
        else:
            picked = self._choose_mixed(chains, scores, rows)
        for chain, token_id in zip(chains, picked.tolist(), strict=True):
            chain.token_ids.append(token_id)
        return picked

    def _choose_mixed(self, chains: Seq[Chain], scores: Tensor, rows: Seq[Row]) -> Tensor:
        picked = torch.empty(len(chains), dtype=torch.long, device=scores.device)
        coupled = [index for index, chain in enumerate(chains) if chain.is_coupled]
        if coupled:
            picked[coupled] = self._sampler.pick(scores[coupled], [rows[index] for index in coupled])
        drawn = [index for index, chain in enumerate(chains) if not chain.is_coupled]
        sample = self._sampler.sample_sparse(scores[drawn], [rows[index] for index in drawn], _LAW_SIZE)
        picked[drawn] = torch.tensor(sample.token_ids, device=scores.device)
        for index, law in zip(drawn, sample.laws, strict=True):
            chains[index].laws.append(law)
        return picked
