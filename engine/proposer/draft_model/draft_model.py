"""A draft model for proposers: prefills prompts, grows chains and trees, and maps logits to the target's vocabulary."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.batch.indexing import index_tensor
from engine.batch.span import Span
from engine.model.runner.model_runner import ModelRunner
from engine.proposer.draft_model.draft_sequence import DraftSequence, DraftSequences
from engine.proposer.growth.block import Blocks
from engine.proposer.growth.chain import Chain, ChainSampler, begun, next_steps
from engine.proposer.growth.tree import Tree
from engine.proposer.growth.tree_sampler import TreeSampler
from engine.proposer.vocab_mapping.translation import Translation
from engine.sampling.sampler import Sampler

# Tokens of a sequence to compute: its missing tokens, then these drafts.
PrefillJob = tuple[DraftSequence, Seq[int]]


class DraftModel:
    """A model runner with its sequences and its sampler.

    Attributes:
        sampler: Chooses the drafts of chains.
        tree_sampler: Chooses the drafts of trees.
        sequences: The open sequences.
        translation: Maps the target's tokens, which chains and trees are made of, to the model's own tokens.
        mask_id: The id in place of unknown tokens, of a model trained to draft all of them in one pass (PARD).
    """

    def __init__(
        self,
        runner: ModelRunner,
        sequences: DraftSequences,
        translation: Translation,
        *,
        max_tokens_per_round: int,
        mask_id: int | None = None,
    ) -> None:
        self.runner = runner
        self.sequences = sequences
        self.translation = translation
        self.mask_id = mask_id
        self.sampler = ChainSampler(Sampler())
        self.tree_sampler = TreeSampler(Sampler())
        self._max_tokens_per_round = max_tokens_per_round

    def prefill(self, jobs: Seq[PrefillJob]) -> tuple[list[PrefillJob], Tensor]:
        """Compute the missing tokens and the drafts of jobs, within the token budget of a round.

        Jobs with the fewest missing tokens go first, so they do not wait for a long prompt.

        Returns:
            The complete jobs, with as many drafts as their states have slots, and the logits after the last committed
            token and after each draft: [R, V] float32, job by job.
        """
        budget = self._max_tokens_per_round
        spans: list[Span] = []
        begun: list[PrefillJob] = []
        for sequence, draft_ids in sorted(jobs, key=lambda job: job[0].num_missing_tokens):
            if budget > 0:
                draft_ids = draft_ids[: self.sequences.plan_states(sequence, budget, len(draft_ids))]
                spans.append(sequence.next_span(budget, self.translation.to_draft(draft_ids)))
                begun.append((sequence, draft_ids))
                budget -= len(spans[-1].token_ids)
        logits = self.translation.align(self.runner.forward(spans)) if spans else torch.empty(0, 0)
        for (sequence, _), span in zip(begun, spans, strict=True):
            sequence.computed(span)
            self.sequences.blocks.keep_snapshots(sequence.blocks)
            if not span.num_logits:
                self.sequences.blocks.settle_states(sequence.blocks)
        return [job for job, span in zip(begun, spans, strict=True) if span.num_logits], logits

    def grow(
        self, chains: Seq[Chain], is_stopped: Callable[[], bool] = lambda: False, last_ids: Tensor | None = None
    ) -> bool:
        """Decode every chain until it is long enough; return False if `is_stopped` ended it early.

        `last_ids` [B] int64, if given, are the chains' last tokens, which the host may not have read yet.
        """
        if self.mask_id is not None:
            return not is_stopped() and self._grow_blocks(chains, self.mask_id)
        token_ids = last_ids
        while growing := [row for row, chain in enumerate(chains) if chain.num_left > 0]:
            if len(growing) < len(chains):
                chains = [chains[row] for row in growing]
                token_ids = token_ids if token_ids is None else token_ids[index_tensor(growing, token_ids.device)]
            if token_ids is None:
                token_ids = index_tensor((chain.last_id for chain in chains), self.runner.device)
            token_ids = self._run_steps(chains, token_ids, is_stopped)
            if token_ids is None:
                self.sampler.give_up()
                return False
        return True

    def _run_steps(self, chains: Seq[Chain], token_ids: Tensor, is_stopped: Callable[[], bool]) -> Tensor | None:
        """Decode chains after their last tokens `token_ids` until the first is long enough; None if stopped early.

        Return the drafted last tokens.
        """
        spans = next_steps(chains)
        if recorded := begun(self.runner.draft_steps(spans), chains, spans, token_ids):
            return recorded.last_ids if self.sampler.run_steps(recorded, chains, is_stopped) else None
        for step in self.runner.plan_own_steps(spans):
            if is_stopped():
                return None
            step.input_ids.copy_(self.translation.feed(token_ids))
            token_ids = self.sampler.extend(chains, self.translation.align(self.runner.run(step)))
        return token_ids

    def _grow_blocks(self, chains: Seq[Chain], mask_id: int) -> bool:
        """Draft all tokens of every chain in one pass over its last token and masks; return True."""
        num_drafts = [chain.num_left for chain in chains]
        spans = [
            chain.next_span(num)._replace(token_ids=[chain.last_id, *[mask_id] * (num - 1)])
            for chain, num in zip(chains, num_drafts, strict=True)
        ]
        logits = self.translation.align(self.runner.forward(spans))
        Blocks(lambda rows, _: logits[rows], num_drafts).grow(chains, self.sampler)
        return True

    def branch(self, trees: Seq[Tree], logits: Tensor) -> None:
        """Grow trees from their roots' logits, `[B, V]`, until no level is worth a pass.

        A tree without free slots for its next level ends.
        """
        while trees:
            self.tree_sampler.branch(trees, logits)
            for tree in trees:
                if not self.sequences.blocks.reserve(tree.blocks, tree.num_slots):
                    tree.stop()
            trees = [tree for tree in trees if tree.level]
            if trees:
                spans = [tree.span() for tree in trees]
                fed = [span._replace(token_ids=self.translation.to_draft(span.token_ids)) for span in spans]
                logits = self.translation.align(self.runner.forward(fed))
