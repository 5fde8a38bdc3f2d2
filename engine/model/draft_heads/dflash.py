"""DFlash (arXiv:2602.06036) and DSpark (arXiv:2607.05147): a block of masks, in one pass over the target's states.

    position             0 ... n - 2                      n - 1    n   ...  n + K - 1
    keys and values      of fc(tapped states), per layer  of the block's own rows
    the block                                             token    mask ... mask        -> logits of n ... n + K - 1

Rows of a block see all its rows, except in causal layers. With DSpark the logits of a draft get a term of low rank that
depends on the draft before it, and the block's first row drafts too. With DFlash 2 the likeliest tokens of a draft get
scores that depend on the draft before it, and a row is mixed with the rows of its block before it. With XPress the term
depends on all drafts before.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.draft_heads.checkpoint import MASK_EMBEDDING
from engine.model.draft_heads.head import BlockLogits, no_lm_head
from engine.model.draft_heads.layers import HeadReader, spread
from engine.model.draft_heads.published import HeadFormat
from engine.model.forward_batch import UNKNOWN, ForwardBatch
from engine.model.linear.packed_linear import Linear, linear_of
from protos.errors import ConfigError


class DFlashHead:
    """Implements `BlockHead`; its states are empty, since the text's states are in its KV."""

    def __init__(self, config: HeadFormat, reader: HeadReader) -> None:
        """Take over the tensors."""
        assert config.block is not None, "a parallel head has blocks"
        width = config.layer.hidden_size
        self._config, self._block = config, config.block
        self.taps = config.taps
        self.num_more_rows = 0 if config.block.is_anchor_drafting else 1
        self.max_drafts: int | None = config.block.num_rows - self.num_more_rows
        self._layers = reader.layers(has_pairs=False)
        self.layer_shapes, self.place = self._layers.shapes, self._layers.place
        self._fuse = reader.linear("fc", width, len(config.taps.layers) * config.target.hidden_size)
        self._hidden_norm = reader.vector("hidden_norm", width)
        self._embedding, self._target_ids = reader.embedding(), reader.target_ids()
        self._mask_embedding = reader.take_if_there(MASK_EMBEDDING, width)
        self._own_lm_head = reader.lm_head(is_needed=False)
        self.lm_head: Linear = self._own_lm_head or no_lm_head
        self._term = block_term(config, reader, self._target_ids)
        if config.block.selector_rank and self._target_ids is not None:
            raise ConfigError(
                "a DFlash 2 head with token ids of its own (d2t) cannot be computed; use a whole vocabulary"
            )
        _take_confidence(config, reader)

    @torch.inference_mode()
    def read(self, batch: ForwardBatch | None, features: Tensor) -> Tensor:
        assert batch is not None, "it has KV"
        context = self._layers.rows.add_norm(self._fuse(features), None, self._hidden_norm)[1]
        self._layers.write_context(batch, context)
        num_rows = len(features) if batch.logit_rows is None else len(batch.logit_rows)
        return features.new_empty(num_rows, 0)

    def block_ids(self, last_id: int, num_drafts: int) -> list[int]:
        return [last_id, *[self._block.mask_id] * (num_drafts + self.num_more_rows - 1)]

    @torch.inference_mode()
    def block(self, batch: ForwardBatch | None, states: Tensor, num_drafts: Seq[int]) -> BlockLogits:
        assert batch is not None, "every block has rows"
        embedded = self._embedding.index_select(0, batch.input_ids)
        if self._mask_embedding is not None:
            is_mask = batch.input_ids == self._block.mask_id
            embedded = torch.where(is_mask[:, None], self._mask_embedding, embedded)
        embedded = embedded * self._block.embedding_scale
        normed = self._layers.rows.add_norm(embedded, None, self._layers.input_norm)[1]
        places = None
        if self._block.selector_rank:
            sizes = [num + self.num_more_rows for num in num_drafts]
            places = torch.cat([torch.arange(size, device=normed.device) for size in sizes])
        # A refiner reads the states of all rows, and nothing else does.
        read = batch if self._block.refiner is None else replace(batch, logit_rows=None)
        _, all_hidden = self._layers(read, normed, embedded, places)
        hidden = all_hidden  # [R, S], of the drafts
        if read is not batch and batch.logit_rows is not None:
            hidden = all_hidden.index_select(0, batch.logit_rows)
        logits = (self._own_lm_head or self.lm_head)(hidden).float() * self._block.logit_scale
        if self._block.logit_softcap is not None:
            logits = torch.tanh(logits / self._block.logit_softcap) * self._block.logit_softcap
        if self._term is not None:
            return self._term.over(BlockStates(logits, hidden, all_hidden, num_drafts))
        logits = spread(logits, self._target_ids, self._config.target.vocab_size)
        return lambda rows, _: logits[rows]


def _take_confidence(config: HeadFormat, reader: HeadReader) -> None:
    """Drop the head that predicts acceptance: the engine measures it (`engine.accounting.acceptance`)."""
    block = config.block
    if block is not None and block.has_confidence:
        size = config.layer.hidden_size + (block.markov_rank if block.has_markov_confidence else 0)
        reader.take("confidence_head.proj.weight", 1, size)
        reader.take_if_there("confidence_head.proj.bias", 1)


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
        assert config.block is not None, "only blocks have one"
        vocab_size, rank = config.target.vocab_size, config.block.selector_rank
        self._num_candidates = config.block.selector_top_k
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
        (rank, inner), width, size = block.refiner, config.layer.hidden_size, block.num_rows
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


BlockTerm = MarkovTerm | Selector | Refiner


def block_term(config: HeadFormat, reader: HeadReader, target_ids: Tensor | None) -> BlockTerm | None:
    """Return the term of a head; None if its drafts do not depend on each other."""
    block = config.block
    assert block is not None, "only blocks have such a term"
    if block.selector_rank:
        return Selector(config, reader)
    if block.refiner is not None:
        return Refiner(config, reader, target_ids)
    return MarkovTerm(config, reader, target_ids) if block.markov_rank else None
