"""The part of a block's logits that depends on the drafts before a draft: of DSpark, DFlash 2 and XPress."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.draft_heads.head import BlockLogits
from engine.model.draft_heads.layers import HeadReader, spread
from engine.model.draft_heads.published import HeadFormat
from engine.model.forward_batch import UNKNOWN
from engine.model.linear.packed_linear import linear_of


@dataclass(frozen=True, slots=True)
class BlockStates:
    """The last normed states of blocks: S is their width, V' the head's own vocabulary.

    Attributes:
        logits: of the drafts, block after block, without the term, [R, V'] float32.
        hidden: of the drafts, [R, S].
        all_hidden: of all rows of the blocks, [T, S].
        num_drafts: of each block.
    """

    logits: Tensor
    hidden: Tensor
    all_hidden: Tensor
    num_drafts: Seq[int]


class BlockTerm(Protocol):
    """A function of the tokens before a draft."""

    def over(self, states: BlockStates) -> BlockLogits:
        """Return the logits with the term."""


class MarkovTerm:
    """DSpark's term of low rank, of the token before the draft (arXiv:2607.05147)."""

    def __init__(self, config: HeadFormat, reader: HeadReader, target_ids: Tensor | None) -> None:
        assert config.block is not None, "only blocks have such a term"
        rank, width = config.block.markov_rank, config.layer.hidden_size
        self._vocab_size, self._target_ids = config.target.vocab_size, target_ids
        self._embedding = reader.take("markov_head.markov_w1.weight", config.target.vocab_size, rank)
        self._output = linear_of(reader.take("markov_head.markov_w2.weight", config.draft_vocab_size, rank), None)
        self._gate = None
        if config.block.markov_type == "gated":
            gate = reader.take("markov_head.gate_proj.weight", rank, width + rank)
            self._gate = linear_of(gate, reader.take("markov_head.gate_proj.bias", rank))

    def over(self, states: BlockStates) -> BlockLogits:
        @torch.inference_mode()
        def logits_of(rows: Seq[int], before: Seq[Seq[int]]) -> Tensor:
            last = torch.tensor([ids[-1] for ids in before], device=states.logits.device)
            embedded = self._embedding.index_select(0, last)
            if self._gate is not None:
                embedded = torch.sigmoid(self._gate(torch.cat((states.hidden[rows], embedded), dim=-1))) * embedded
            return spread(states.logits[rows] + self._output(embedded).float(), self._target_ids, self._vocab_size)

        return logits_of


class Selector:
    """DFlash 2's choice among the likeliest tokens of a draft, by the token before it."""

    def __init__(self, config: HeadFormat, reader: HeadReader) -> None:
        refinement = None if config.block is None else config.block.refinement
        assert refinement is not None, "only DFlash 2 has one"
        vocab_size, rank = config.target.vocab_size, refinement.selector_rank
        self._num_candidates = refinement.selector_top_k
        self._before, self._after = (
            reader.take(reader.first_of(name, f"{name}.weight"), vocab_size, rank)
            for name in ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook")
        )
        self._project = reader.linear("candidate_selector.hidden_projection", rank, config.layer.hidden_size)

    def over(self, states: BlockStates) -> BlockLogits:
        """Return the logits of the candidates; other tokens get `UNKNOWN`."""

        @torch.inference_mode()
        def logits_of(rows: Seq[int], before: Seq[Seq[int]]) -> Tensor:
            logits = states.logits[rows]
            values, candidates = logits.topk(self._num_candidates)
            last = torch.tensor([ids[-1] for ids in before], device=logits.device)
            context = self._before.index_select(0, last) * self._project(states.hidden[rows])  # [R, rank]
            scores = values + torch.einsum("rd,rkd->rk", context, self._after[candidates]).float()
            return torch.full_like(logits, UNKNOWN).scatter_(1, candidates, scores)

        return logits_of


class Refiner:
    """XPress's network over all drafts before a draft (arXiv:2608.02438).

    Row j of a block has a latent of its state, the mean of the block's states and the token before its own place; the
    row of a draft mixes the latents up to its own. The authors iterate over whole blocks until they settle, at
    the chain that is chosen draft by draft.
    """

    # The tensors' names in speculators' layout, and in the authors'.
    _NAMES = (
        ("refiner_head.token_embed.weight", "xpress_head.w1.weight"),
        ("refiner_head.down_h.weight", "xpress_head.down_h.weight"),
        ("refiner_head.down_g.weight", "xpress_head.down_g.weight"),
        ("refiner_head.in_proj.weight", "xpress_head.in_proj.weight"),
        ("refiner_head.mix_l", "xpress_head.mix.L"),
        ("refiner_head.mlp_gate.weight", "xpress_head.mlp.gate_proj.weight"),
        ("refiner_head.mlp_up.weight", "xpress_head.mlp.up_proj.weight"),
        ("refiner_head.mlp_down.weight", "xpress_head.mlp.down_proj.weight"),
        ("refiner_head.readout.weight", "xpress_head.w2.weight"),
    )

    def __init__(self, config: HeadFormat, reader: HeadReader, target_ids: Tensor | None) -> None:
        block = config.block
        assert block is not None, "only blocks have such a term"
        assert block.refiner is not None, "only XPress has one"
        rank, inner, width, size = (
            block.refiner.rank,
            block.refiner.inner_size,
            config.layer.hidden_size,
            block.num_rows,
        )
        vocab_size = config.target.vocab_size
        shapes = (
            (vocab_size, rank),
            (rank, width),
            (rank, width),
            (rank, 3 * rank),
            (rank, size, size),
            (inner, rank),
            (inner, rank),
            (rank, inner),
            (config.draft_vocab_size, rank),
        )
        tensors = [
            reader.take(reader.first_of(*names), *shape) for names, shape in zip(self._NAMES, shapes, strict=True)
        ]
        self._embedding, own, mean, joint, mix, gate, up, down, output = tensors
        self._own, self._mean = (
            linear_of((part.float() @ weight.float()).to(joint.dtype), None)
            for part, weight in ((joint[:, :rank], own), (joint[:, rank : 2 * rank], mean))
        )
        self._of_token = linear_of(joint[:, 2 * rank :].contiguous(), None)
        self._mix = mix.tril() + torch.eye(size, dtype=mix.dtype, device=mix.device)  # [rank, row, row before]
        self._gate, self._up, self._down = (linear_of(weight, None) for weight in (gate, up, down))
        self._output = linear_of(output, None)
        self._num_more_rows = 0 if block.is_anchor_drafting else 1
        self._vocab_size, self._target_ids = vocab_size, target_ids

    @torch.inference_mode()
    def over(self, states: BlockStates) -> BlockLogits:
        sizes = [num + self._num_more_rows for num in states.num_drafts]
        means = torch.stack([rows.mean(0) for rows in states.all_hidden.split(sizes)])
        counts = torch.tensor(sizes, device=means.device)
        latents = self._own(states.all_hidden) + self._mean(means).repeat_interleave(counts, 0)  # [T, rank]
        places = [
            (first, depth + self._num_more_rows)
            for first, num in zip([0, *accumulate(sizes)], states.num_drafts, strict=False)
            for depth in range(num)
        ]  # of each draft: its block's first row, and its own place in the block

        @torch.inference_mode()
        def logits_of(rows: Seq[int], before: Seq[Seq[int]]) -> Tensor:
            found = [places[row] for row in rows]
            logits = states.logits[rows] + self._biases(latents, found, before).float()
            return spread(logits, self._target_ids, self._vocab_size)

        return logits_of

    def _biases(self, latents: Tensor, places: Seq[tuple[int, int]], before: Seq[Seq[int]]) -> Tensor:
        """Rows at `places` after the tokens `before` -> [R, V']."""
        longest = 1 + max(place for _, place in places)
        index, tokens = [], []
        for (first, place), ids in zip(places, before, strict=True):
            padding = [place] * (longest - 1 - place)  # has no weight
            index.append([first + each for each in (*range(place + 1), *padding)])
            known = [*ids[-(place + 1) :]]
            known = [known[0]] * (place + 1 - len(known)) + known  # a text of one token
            tokens.append(known + known[-1:] * len(padding))
        device = latents.device
        embedded = self._embedding[torch.tensor(tokens, device=device)]
        x = latents[torch.tensor(index, device=device)] + self._of_token(embedded)  # [R, rows, rank]
        own = torch.tensor([place for _, place in places], device=device)
        mixed = torch.einsum("crj,rjc->rc", self._mix[:, own, :longest], x)
        return self._output(mixed + self._down(F.silu(self._gate(mixed)) * self._up(mixed)))


def block_term(config: HeadFormat, reader: HeadReader, target_ids: Tensor | None) -> BlockTerm | None:
    """Return the term of a head; None if its drafts do not depend on each other."""
    block = config.block
    assert block is not None, "only blocks have such a term"
    if block.refinement is not None:
        return Selector(config, reader)
    if block.refiner is not None:
        return Refiner(config, reader, target_ids)
    return MarkovTerm(config, reader, target_ids) if block.markov_rank else None
