"""A draft model as proposers use it: prompts read, chains and trees grown, logits over the target's vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model_runner import ModelRunner
from engine.proposer.chain import Chain, ChainSampler
from engine.proposer.mirror import Mirror
from engine.proposer.mirrors import Mirrors
from engine.proposer.tree import Tree
from engine.proposer.tree_sampler import TreeSampler
from engine.sampler import Sampler
from engine.span import Span
from protos.errors import ConfigError

_MAX_PADDING_SHARE = 0.01  # of the vocabulary: two sizes of one tokenizer differ by the padding of their embeddings
_MAX_STEPS_PER_PLAN = 16


@dataclass(frozen=True, slots=True)
class Reading:
    """What is to be computed of a sequence: its missing tokens, and `draft_ids` behind them."""

    mirror: Mirror
    draft_ids: Seq[int] = ()


@dataclass(frozen=True, slots=True)
class Read:
    """Readings that are complete, and the logits behind their last committed token and each of their drafts."""

    readings: list[Reading]
    logits: Tensor  # [R, V] float32, reading by reading


class DraftModel:
    """A model runner, its mirrors, and how chains grow by them.

    Attributes:
        sampler: chooses the drafts.
        mirrors: the open sequences.
    """

    def __init__(
        self, runner: ModelRunner, mirrors: Mirrors, *, max_tokens_per_round: int, target_vocab_size: int | None
    ) -> None:
        """Raises ConfigError if draft and target have different vocabularies."""
        self.runner = runner
        self.mirrors = mirrors
        self.sampler = ChainSampler(Sampler())
        self._tree_sampler = TreeSampler(Sampler())
        self._max_tokens_per_round = max_tokens_per_round
        self._vocab_size = runner.vocab_size if target_vocab_size is None else target_vocab_size
        _check_vocab_sizes(runner.vocab_size, self._vocab_size)

    def read(self, readings: Seq[Reading]) -> Read:
        """Compute what is committed but not in the pool, and the drafts behind it, within the budget of a round.

        Those with the least to compute go first: a long prompt waits for its turn, not the others for it.
        """
        budget = self._max_tokens_per_round
        spans: list[Span] = []
        begun: list[Reading] = []
        for reading in sorted(readings, key=lambda reading: reading.mirror.num_missing_tokens):
            if budget > 0:
                spans.append(reading.mirror.next_span(budget, reading.draft_ids))
                begun.append(reading)
                budget -= len(spans[-1].token_ids)
        logits = self._align(self.runner.forward(spans)) if spans else torch.empty(0, self._vocab_size)
        for reading, span in zip(begun, spans, strict=True):
            sequence = reading.mirror.sequence
            reading.mirror.computed(span)
            self.mirrors.blocks.publish(sequence, sequence.num_computed_tokens)
        return Read([reading for reading, span in zip(begun, spans, strict=True) if span.num_logits], logits)

    def grow(self, chains: Seq[Chain], is_stopped: Callable[[], bool] = lambda: False) -> bool:
        """Feed every chain its own last token until all are long enough; False if it was stopped before."""
        while chains := [chain for chain in chains if chain.num_left > 0]:
            num_steps = min(_MAX_STEPS_PER_PLAN, *(chain.num_left for chain in chains))
            token_ids = torch.tensor([chain.last_id for chain in chains])
            for step in self.runner.plan_steps([chain.steps(num_steps) for chain in chains]):
                if is_stopped():
                    return False
                step.input_ids.copy_(token_ids)
                token_ids = self.sampler.extend(chains, self._align(self.runner.run(step)))
        return True

    def branch(self, trees: Seq[Tree], logits: Tensor) -> None:
        """Grow trees whose roots have these logits, `[B, V]`, until no level is left that is worth a pass.

        A tree that finds no slots for its next level stays as it is.
        """
        while trees:
            self._tree_sampler.branch(trees, logits)
            for tree in trees:
                if not self.mirrors.blocks.reserve(tree.sequence, tree.num_slots):
                    tree.stop()
            trees = [tree for tree in trees if tree.level]
            if trees:
                logits = self._align(self.runner.forward([tree.span() for tree in trees]))

    def _align(self, logits: Tensor) -> Tensor:
        """[R, V of the draft] -> [R, V of the target]: padding ids of either side cannot be drafted."""
        num_missing = self._vocab_size - logits.shape[1]
        if num_missing > 0:
            return torch.nn.functional.pad(logits, (0, num_missing), value=float("-inf"))
        return logits[:, : self._vocab_size]


def _check_vocab_sizes(draft: int, target: int) -> None:
    if abs(draft - target) > _MAX_PADDING_SHARE * target:
        raise ConfigError(
            f"the draft's vocabulary has {draft} tokens and the target's {target}; their tokenizers must be the same"
        )
