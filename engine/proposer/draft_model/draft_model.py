"""A draft model as proposers use it: prompts read, chains and trees grown, logits over the target's vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.runner.model_runner import ModelRunner
from engine.proposer.draft_model.draft_sequence import DraftSequence
from engine.proposer.draft_model.draft_sequences import DraftSequences
from engine.proposer.growth.chain import Chain, ChainSampler, next_steps
from engine.proposer.growth.tree import Tree
from engine.proposer.growth.tree_sampler import TreeSampler
from engine.proposer.vocab_mapping.translation import Translation
from engine.sampling.sampler import Sampler
from engine.span import Span


@dataclass(frozen=True, slots=True)
class Reading:
    """Tokens of a sequence to be computed: its missing tokens, and `draft_ids` behind them."""

    sequence: DraftSequence
    draft_ids: Seq[int] = ()


@dataclass(frozen=True, slots=True)
class Read:
    """Readings that are complete, and the logits behind their last committed token and each of their drafts."""

    readings: list[Reading]
    logits: Tensor  # [R, V] float32, reading by reading


class DraftModel:
    """A model runner, its sequences, and how chains grow by them.

    Attributes:
        sampler: chooses the drafts.
        sequences: the open sequences.
        translation: between its own tokens and the target's, which chains and trees are made of.
    """

    def __init__(
        self, runner: ModelRunner, sequences: DraftSequences, translation: Translation, *, max_tokens_per_round: int
    ) -> None:
        self.runner = runner
        self.sequences = sequences
        self.translation = translation
        self.sampler = ChainSampler(Sampler())
        self._tree_sampler = TreeSampler(Sampler())
        self._max_tokens_per_round = max_tokens_per_round

    def read(self, readings: Seq[Reading]) -> Read:
        """Compute what is committed but not in the pool, and the drafts behind it, within the budget of a round.

        Those with the least to compute go first: a long prompt waits for its turn, not the others for it.
        """
        budget = self._max_tokens_per_round
        spans: list[Span] = []
        begun: list[Reading] = []
        for reading in sorted(readings, key=lambda reading: reading.sequence.num_missing_tokens):
            if budget > 0:
                spans.append(reading.sequence.next_span(budget, self.translation.read(reading.draft_ids)))
                begun.append(reading)
                budget -= len(spans[-1].token_ids)
        logits = self.translation.align(self.runner.forward(spans)) if spans else torch.empty(0, 0)
        for reading, span in zip(begun, spans, strict=True):
            blocks = reading.sequence.blocks
            reading.sequence.computed(span)
            self.sequences.blocks.publish(blocks, blocks.num_computed_tokens)
        return Read([reading for reading, span in zip(begun, spans, strict=True) if span.num_logits], logits)

    def grow(self, chains: Seq[Chain], is_stopped: Callable[[], bool] = lambda: False) -> bool:
        """Feed every chain its own last token until all are long enough; False if it was stopped before."""
        while chains := [chain for chain in chains if chain.num_left > 0]:
            token_ids = torch.tensor([chain.last_id for chain in chains])
            for step in self.runner.plan_own_steps(next_steps(chains)):
                if is_stopped():
                    return False
                step.input_ids.copy_(self.translation.feed(token_ids))
                token_ids = self.sampler.extend(chains, self.translation.align(self.runner.run(step)))
        return True

    def branch(self, trees: Seq[Tree], logits: Tensor) -> None:
        """Grow trees whose roots have these logits, `[B, V]`, until no level is left that is worth a pass.

        A tree that finds no slots for its next level stays as it is.
        """
        while trees:
            self._tree_sampler.branch(trees, logits)
            for tree in trees:
                if not self.sequences.blocks.reserve(tree.blocks, tree.num_slots):
                    tree.stop()
            trees = [tree for tree in trees if tree.level]
            if trees:
                spans = [tree.span() for tree in trees]
                fed = [span._replace(token_ids=self.translation.read(span.token_ids)) for span in spans]
                logits = self.translation.align(self.runner.forward(fed))
