"""Drafts in the making: one growing chain of tokens per sequence, and how the next token of all of them is chosen."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.draft import Draft, SparseDistribution
from engine.native.logits import are_finite
from engine.sampling.grammar import GrammarMatcher
from engine.sampling.logits_row import LogitsRow
from engine.sampling.noise import Purpose
from engine.sampling.sampler import Sampler
from engine.sampling.sparse_distribution import one_hot
from engine.sampling.thread_limit import limited_threads
from engine.sequence.request_tokens import RequestTokens
from engine.span import Span
from engine.verifier.verify_task import IMPOSSIBLE_ID
from protos.messages import VerifyMode

_MAX_STEPS = 16  # of one plan
_DISTRIBUTION_SIZE = 32  # at T=1, 8, 32 and 128 tokens accept 63, 68 and 71% of drafts in a synthetic study


class Chain:
    """The draft of one sequence while it grows, behind `prefix_ids`; `block_table` has slots for both.

    `row` sees `token_ids` grow: it always stands for the next token. To the row the prefix is committed, so a chain
    behind tokens that are merely likely is the chain that they would get once they are committed.

    Tokens are the target's. Those that are fed lie `position_offset` slots behind their positions: the draft model may
    read more tokens than the target has before the drafts, or less. `matcher` has read the committed tokens.
    """

    def __init__(
        self,
        sequence: RequestTokens,
        prefix_ids: Seq[int],
        block_table: Seq[int],
        num_wanted: int,
        *,
        matcher: GrammarMatcher | None,
        position_offset: int = 0,
    ) -> None:
        self.sequence = sequence
        self.num_wanted = num_wanted
        self.token_ids: list[int] = []
        self.distributions: list[SparseDistribution] = []
        self.block_table = block_table
        self._num_sound: int | None = None  # tokens before the first that is not; None: all are
        self._matcher = matcher
        self._position_offset = position_offset
        self.is_coupled = sequence.verify is VerifyMode.COUPLED
        self.row = row_after(sequence, prefix_ids, self.token_ids)

    @property
    def num_left(self) -> int:
        """Tokens until it is long enough."""
        return self.num_wanted - len(self.token_ids)

    @property
    def last_id(self) -> int:
        """The token to be fed next."""
        return self.token_ids[-1] if self.token_ids else self.row.token_ids[-1]

    @property
    def next_kv_index(self) -> int:
        """KV index of the token to be fed next."""
        return self.row.position - 1 + self._position_offset

    def add(self, token_id: int, *, is_sound: bool) -> None:
        """Append a token; one is not sound that logits gave which are not finite."""
        if not is_sound and self._num_sound is None:
            self._num_sound = len(self.token_ids)
        self.token_ids.append(token_id)

    def draft(self) -> Draft:
        """Return what has grown so far; it ends with a token that is none where the draft model has overflowed.

        The target computes what lies before that, and counts it as invalid.
        """
        token_ids, distributions = tuple(self.token_ids), tuple(self.distributions)
        if self._num_sound is not None:
            token_ids = (*token_ids[: self._num_sound], IMPOSSIBLE_ID)
            if distributions:
                distributions = (*distributions[: self._num_sound], one_hot(IMPOSSIBLE_ID))
        return Draft(token_ids, distributions)

    def next_row(self) -> LogitsRow:
        """`row`, with what the grammar allows there."""
        return masked(self.row, self._matcher, len(self.sequence.token_ids))


def next_steps(chains: Seq[Chain]) -> list[Span]:
    """The next tokens that each chain feeds back, the first of them known, in their slots; equally many of all."""
    num_steps = min(_MAX_STEPS, *(chain.num_left for chain in chains))
    return [Span([0] * num_steps, chain.next_kv_index, chain.block_table, num_steps) for chain in chains]


def row_after(sequence: RequestTokens, prefix_ids: Seq[int], draft_ids: Seq[int]) -> LogitsRow:
    """The row of the sequence that samples what follows `prefix_ids`, taken as committed, and then `draft_ids`."""
    return LogitsRow(
        sequence.sampling, prefix_ids, sequence.num_prompt_tokens, sequence.request.sample_index, draft_ids=draft_ids
    )


def masked(row: LogitsRow, matcher: GrammarMatcher | None, num_committed: int) -> LogitsRow:
    """Return the row with what the grammar allows behind its prefix; `row` itself without a grammar.

    `matcher` has read the `num_committed` committed tokens; the prefix may be longer.
    """
    if matcher is None:
        return row
    ahead = (*row.token_ids[num_committed:], *row.draft_ids)
    return row._replace(mask=matcher.mask_after(ahead))


class ChainSampler:
    """Chooses drafts with the sampler that the target verifies them with."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def extend(self, chains: Seq[Chain], logits: Tensor) -> Tensor:
        """Append one token to each chain and return them, [B] int64; `logits` are [B, V] float32.

        Chains for coupled verification sample with the noise the target will use; all others are drawn from a
        sparse distribution that goes along, with noise of their own.
        """
        rows = [chain.next_row() for chain in chains]
        with limited_threads(logits):
            are_sound = are_finite(logits)
            if all(chain.is_coupled for chain in chains):
                token_ids = self._sampler.draw(logits, rows)
            else:
                token_ids = self._choose_mixed(chains, self._sampler.apply_processors(logits, rows), rows)
        for chain, token_id, is_sound in zip(chains, token_ids.tolist(), are_sound.tolist(), strict=True):
            chain.add(token_id, is_sound=is_sound)
        return token_ids

    def rank(self, rows: Seq[LogitsRow], is_coupled: Seq[bool], logits: Tensor, k: int) -> list[list[int]]:
        """The up to `k` tokens per row that the target will most likely say there, likeliest first.

        The target's token is the argmax of its scores plus a noise that is public: in coupled verification that of
        every token, elsewhere that of the recovered or bonus token. So the draft ranks its own scores plus that noise
        (and draws no draft from it).
        """
        scores = self._sampler.apply_processors(logits, rows)
        ranked: list[list[int]] = [[]] * len(rows)
        for purpose, flag in ((Purpose.TARGET_GUMBEL, True), (Purpose.RESIDUAL, False)):
            chosen = [index for index, each in enumerate(is_coupled) if each is flag]
            if chosen:
                found = self._sampler.rank(scores[chosen], [rows[index] for index in chosen], purpose, k)
                for index, token_ids in zip(chosen, found, strict=True):
                    ranked[index] = token_ids
        return ranked

    def _choose_mixed(self, chains: Seq[Chain], scores: Tensor, rows: Seq[LogitsRow]) -> Tensor:
        token_ids = torch.empty(len(chains), dtype=torch.long, device=scores.device)
        coupled = [index for index, chain in enumerate(chains) if chain.is_coupled]
        if coupled:
            token_ids[coupled] = self._sampler.sample(scores[coupled], [rows[index] for index in coupled])
        drawn = [index for index, chain in enumerate(chains) if not chain.is_coupled]
        sample = self._sampler.sample_sparse(scores[drawn], [rows[index] for index in drawn], _DISTRIBUTION_SIZE)
        token_ids[drawn] = torch.tensor(sample.token_ids, device=scores.device)
        for index, distribution in zip(drawn, sample.distributions, strict=True):
            chains[index].distributions.append(distribution)
        return token_ids
