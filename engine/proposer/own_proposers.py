"""The proposers in a runner's own process: by its head, or by its own weights."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.accounting.record import PassedRows
from engine.batch.draft import NO_DRAFT, Draft
from engine.batch.span import Span
from engine.model.draft_heads.dflash import DFlashHead
from engine.model.draft_heads.eagle3 import ParallelEagleHead
from engine.model.draft_heads.loader import Head
from engine.model.draft_heads.medusa import MedusaHeads
from engine.model.draft_heads.mtp import MtpHead
from engine.model.draft_heads.self_draft import SelfDraft
from engine.model.runner.model_runner import ModelRunner
from engine.proposer import GuardedProposer, NoProposer, Proposer
from engine.proposer.chain import Chain, ChainSampler, next_steps
from engine.proposer.state_proposer import BlockProposer, MtpProposer, RecurrentProposer, StateProposer
from engine.proposer.tree import Tree, TreeSampler, tree_of
from engine.sequence.batch import DraftQuery
from engine.sequence.sequence import RequestTokens


class SelfProposer(NoProposer):
    """Drafts by the target's own weights. A draft begins with the last committed token, which has no KV yet.

    All slots that it writes, of KV and of recurrent states, are reserved for the pass that verifies the draft, which
    writes them again.
    """

    def __init__(self, runner: ModelRunner, draft: SelfDraft) -> None:
        self._runner = runner
        self._draft = draft
        self._chain_sampler = ChainSampler()
        self._tree_sampler = TreeSampler()

    @torch.inference_mode()
    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        ready = [query for query in queries if query.sequence.num_uncomputed_tokens == 1]
        has_tree = [query.max_tree_nodes > 0 for query in ready]
        chains = [_chain(query) for query, flag in zip(ready, has_tree, strict=True) if not flag]
        trees = [self._tree(query) for query, flag in zip(ready, has_tree, strict=True) if flag]
        self._grow(chains)
        self._branch(trees)
        grown: list[Chain | Tree] = [*chains, *trees]
        drafts = {each.sequence.request_id: each.draft() for each in grown}
        return [drafts.get(query.sequence.request_id, NO_DRAFT) for query in queries]

    def _grow(self, chains: Seq[Chain]) -> None:
        while chains := [chain for chain in chains if chain.num_left > 0]:
            token_ids = torch.tensor([chain.last_id for chain in chains])
            for step in self._runner.plan_steps(next_steps(chains)):
                step.input_ids.copy_(token_ids)
                token_ids = self._chain_sampler.extend(chains, self._draft.logits(step))

    def _branch(self, trees: Seq[Tree]) -> None:
        """Grow level by level. Dropped nodes take slots too; a tree without free slots ends."""
        spans = [_root(tree.sequence) for tree in trees]
        while spans:
            self._tree_sampler.branch(trees, self._logits(spans))
            for tree in trees:
                if tree.num_slots > len(tree.blocks.block_table) * self._runner.block_size:
                    tree.stop()
            trees = [tree for tree in trees if tree.level]
            spans = [tree.span() for tree in trees]

    def _logits(self, spans: Seq[Span]) -> Tensor:
        return self._draft.logits(self._runner.lay_out(spans))

    def _tree(self, query: DraftQuery) -> Tree:
        sequence, num_nodes = query.sequence, query.max_tree_nodes
        return tree_of(sequence, sequence, num_nodes, query.max_draft_tokens, sequence.matcher)


def _chain(query: DraftQuery) -> Chain:
    sequence, num_drafts = query.sequence, query.max_draft_tokens
    return Chain(
        sequence,
        sequence.token_ids,
        sequence.block_table,
        num_drafts,
        matcher=sequence.matcher,
        states=sequence.states,
    )


def _root(sequence: RequestTokens) -> Span:
    return Span(sequence.token_ids[-1:], len(sequence.token_ids) - 1, sequence.block_table, 1)


# Called within a step, at most once each: with True when a new head has drafted for many passes, and with False when a
# draft was not finite, so that the head drafts no more.
HeadReport = Callable[[bool], None]


class LiveHead:
    """A `Proposer` by the runner's head, which may be exchanged between two steps.

    Args:
        runner: it has a head.
    """

    def __init__(self, runner: ModelRunner) -> None:
        assert runner.head is not None, "as required"
        self._runner = runner
        self._report: HeadReport | None = None
        self._num_passes, self._has_failed = 0, False
        self._proposer = _proposer_of(runner, runner.head)
        self._opened: dict[str, RequestTokens] = {}

    def exchange(self, head: Head, report: HeadReport | None) -> None:
        """Let `head` draft. It has no KV of the sequences with blocks, and drafts for them only if it needs none."""
        self._report = report
        self._num_passes, self._has_failed = 0, False
        self._runner.head = head
        self._proposer = _proposer_of(self._runner, head)
        for sequence in self._opened.values():
            if not (head.layer_shapes and sequence.block_table):
                self._proposer.open(sequence)

    def open(self, sequence: RequestTokens) -> None:
        self._opened[sequence.request_id] = sequence
        self._proposer.open(sequence)

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        self._proposer.commit(sequences)

    def close(self, request_id: str) -> None:
        self._opened.pop(request_id, None)
        self._proposer.close(request_id)

    def learn(self, passed: Seq[PassedRows]) -> None:
        self._proposer.learn(passed)

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        drafts = [] if self._has_failed else self._proposer.propose(queries)
        if self._report is not None and not self._has_failed:
            self._check(drafts, self._report)
        return [NO_DRAFT] * len(queries) if self._has_failed else drafts

    def _check(self, drafts: Seq[Draft], report: HeadReport) -> None:
        if self._proposer.has_overflowed:
            self._has_failed = True
            report(False)
        elif any(draft.token_ids for draft in drafts):
            self._num_passes += 1
            if self._num_passes == 100:  # some seconds
                report(True)


def _proposer_of(runner: ModelRunner, head: Head) -> StateProposer:
    if isinstance(head, (MedusaHeads, ParallelEagleHead, DFlashHead)):
        return BlockProposer(runner, head)
    if isinstance(head, MtpHead):
        return MtpProposer(runner, head)
    return RecurrentProposer(runner, head)


def self_proposer(runner: ModelRunner) -> Proposer | None:
    """Return a proposer with the runner's own weights; None if the runner does not draft for itself."""
    if runner.self_draft is None:
        return None
    return GuardedProposer(SelfProposer(runner, runner.self_draft))
