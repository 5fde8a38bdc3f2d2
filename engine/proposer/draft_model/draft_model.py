"""A draft model for proposers, and its copies of the sequences.

The model prefills prompts, grows chains and trees, and maps logits to the target's vocabulary. A copy has the committed
tokens in the draft's vocabulary, with blocks of the draft's pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.batch.indexing import index_tensor
from engine.batch.span import Span
from engine.kv_cache.block_manager import BlockManager
from engine.model.runner.model_runner import ModelRunner
from engine.proposer.chain import Chain, ChainSampler, begun, next_steps
from engine.proposer.translation import Translation
from engine.proposer.tree import Blocks, Tree, TreeSampler
from engine.sampling.grammar import GrammarMatcher
from engine.sampling.grammar_compiler import GrammarCompiler
from engine.sequence.sequence import RequestTokens, TokenBlocks, num_equal, span_states
from protos.errors import RequestError

logger = logging.getLogger(__name__)


class DraftSequence:
    """A sequence in a draft model, and its computed tokens.

    Attributes:
        target_sequence: The sequence in the target's tokens, which choose the drafts.
        blocks: The sequence in the draft's tokens, with the draft's blocks. With one vocabulary, both share one list of
            tokens.
        matcher: The draft's own grammar matcher, after the committed tokens; None if drafts ignore the grammar.
        unverified_ids: Drafts of the last round, in the draft's tokens. Their KV follows that round's committed tokens,
            until `sync` has compared them with the newly committed tokens.
        last_round: The last round that drafted for the sequence.
    """

    def __init__(
        self, target_sequence: RequestTokens, translation: Translation, matcher: GrammarMatcher | None = None
    ) -> None:
        """`matcher` has accepted the output that the request came with."""
        request = target_sequence.request
        self.blocks = TokenBlocks([], request.cache_salt)
        self.matcher = matcher
        self.unverified_ids: Seq[int] = ()
        self.last_round = 0
        self._translation = translation
        self._num_translated = 0
        self._num_matched = len(request.prompt_token_ids) + len(request.output_token_ids)
        self.sync(target_sequence)

    @property
    def num_missing_tokens(self) -> int:
        """The number of committed tokens to compute, at least the last one, whose logits are needed."""
        return self.blocks.num_uncomputed_tokens

    @property
    def position_offset(self) -> int:
        """The draft's number of tokens minus the target's."""
        return len(self.blocks.token_ids) - len(self.target_sequence.token_ids)

    def sync(self, target_sequence: RequestTokens) -> None:
        """Add the tokens committed since the last round; keep the KV of accepted drafts, and drop the others."""
        self.target_sequence = target_sequence
        self._extend(target_sequence.token_ids)
        blocks = self.blocks
        committed = blocks.token_ids[blocks.num_computed_tokens :][: len(self.unverified_ids)]
        num_computed = blocks.num_computed_tokens + num_equal(self.unverified_ids, committed)
        blocks.num_computed_tokens = max(0, min(num_computed, len(blocks.token_ids) - 1))
        self.unverified_ids = ()

    def rewind(self, num_tokens: int, block_size: int) -> bool:
        """Keep only the first `num_tokens` of the draft's tokens; False if a keyed block also has later tokens."""
        blocks = self.blocks
        if num_tokens < blocks.num_computed_tokens:
            blocks.num_computed_tokens = num_tokens
            self.unverified_ids = ()
        del blocks.block_keys[num_tokens // block_size :]
        return blocks.num_keyed_blocks <= num_tokens // block_size

    def next_span(self, max_tokens: int, draft_ids: Seq[int] = ()) -> Span:
        """Return a span of up to `max_tokens` missing tokens.

        After the last missing token come `draft_ids`, and it and each draft get a row of logits.
        """
        blocks = self.blocks
        start = blocks.num_computed_tokens
        end = min(start + max_tokens, len(blocks.token_ids))
        token_ids, num_logits = blocks.token_ids[start:end], 0
        if end == len(blocks.token_ids):
            token_ids, num_logits = [*token_ids, *draft_ids], len(draft_ids) + 1
        states = span_states(blocks.states, start, start + len(token_ids))
        return Span(token_ids, start, blocks.block_table, num_logits, states=states)

    def chain(
        self, prefix_ids: Seq[int], block_table: Seq[int], num_drafts: int, states: Mapping[int, int] | None = None
    ) -> Chain:
        """Return a chain of `num_drafts` tokens after `prefix_ids` (the target's).

        Its KV goes to `block_table`, its recurrent states to the slots `states`, by default the sequence's own.
        """
        return Chain(
            self.target_sequence,
            prefix_ids,
            block_table,
            num_drafts,
            matcher=self.matcher,
            position_offset=self.position_offset,
            states=self.blocks.states if states is None else states,
        )

    def computed(self, span: Span) -> None:
        """Record that a `next_span` was computed; its drafts are in the slots after the committed tokens."""
        blocks = self.blocks
        blocks.num_computed_tokens = min(span.end, len(blocks.token_ids))
        self.unverified_ids = tuple(span.token_ids[len(span.token_ids) - (span.end - blocks.num_computed_tokens) :])

    def _extend(self, token_ids: list[int]) -> None:
        """Add new tokens of the target; if the draft's grammar rejects them, drop the grammar."""
        if self._translation.is_identity:
            self.blocks.token_ids = token_ids
        else:
            self.blocks.token_ids += self._translation.to_draft(token_ids[self._num_translated :])
            self._num_translated = len(token_ids)
        if self.matcher is not None and not self.matcher.read(token_ids[self._num_matched :]):
            self.matcher = None
        self._num_matched = len(token_ids)


class DraftSequences:
    """The draft's copies of the open sequences, over one pool of blocks.

    A round is one call that drafts. Within a round no sequence loses reserved blocks. When the pool is full, the
    sequences that were drafted for longest ago lose their blocks. States of recurrent layers go with the blocks: those
    after a round's drafts stay until `sync` knows which drafts were accepted.
    """

    def __init__(self, blocks: BlockManager, translation: Translation, grammars: GrammarCompiler | None) -> None:
        """With `grammars` None, drafts ignore grammars and are accepted less often."""
        self.blocks = blocks
        self._translation = translation
        self._grammars = grammars
        self._by_id: dict[str, DraftSequence] = {}
        self._round = 0

    def open(self, target_sequence: RequestTokens) -> None:
        """Begin a copy of a sequence."""
        matcher = self._matcher(target_sequence)
        self._by_id[target_sequence.request_id] = DraftSequence(target_sequence, self._translation, matcher)

    def close(self, request_id: str) -> None:
        """Forget a sequence and free its blocks; unknown ids are ignored."""
        sequence = self._by_id.pop(request_id, None)
        if sequence is not None:
            self.blocks.release(sequence.blocks)

    def begin_round(self) -> None:
        """Begin a round: blocks that were reserved before may now be evicted."""
        self._round += 1

    def sync(self, target_sequence: RequestTokens) -> DraftSequence | None:
        """Return the draft's copy with all committed tokens; None if the sequence is not open."""
        sequence = self._by_id.get(target_sequence.request_id)
        if sequence is not None:
            sequence.sync(target_sequence)
            if not self.blocks.settle_states(sequence.blocks):
                self._release(sequence)
            sequence.last_round = self._round
        return sequence

    def rewind(self, request_id: str, num_tokens: int) -> None:
        """Drop a sequence's computed tokens after the first `num_tokens`, since they have changed.

        A keyed block is never overwritten: if one has changed tokens, the sequence releases all its blocks and adopts
        the valid ones again.
        """
        sequence = self._by_id.get(request_id)
        if sequence is not None and not sequence.rewind(num_tokens, self.blocks.block_size):
            self._release(sequence)

    def reserve(self, sequence: DraftSequence, num_tokens: int) -> bool:
        """Reserve slots for the first `num_tokens` positions, and adopt a cached prefix.

        Idle sequences are evicted if needed. If there is still no room, the sequence releases its own blocks, and the
        result is False.
        """
        if not sequence.blocks.block_table:
            self.blocks.adopt_prefix(sequence.blocks)
        while self._lacks_states(sequence) or not self.blocks.reserve(sequence.blocks, num_tokens):
            if not self._evict_idle():
                self._release(sequence)
                return False
        return True

    def plan_states(self, sequence: DraftSequence, max_tokens: int, num_drafts: int) -> int:
        """Give slots to the states after the next `max_tokens` missing tokens and after the drafts that follow them.

        Return how many of `num_drafts` drafts may be computed: all of them without recurrent layers.
        """
        blocks, manager = sequence.blocks, self.blocks
        end = min(blocks.num_computed_tokens + max_tokens, len(blocks.token_ids))
        manager.plan_chunk_states(blocks, end)
        if end < len(blocks.token_ids):
            return num_drafts
        if blocks.num_uncomputed_tokens > 1:  # a repeated question computes the last token again
            manager.plan_state(blocks, end - 1)
        return manager.plan_draft_states(blocks, num_drafts)

    def check_integrity(self) -> None:
        """Assert the invariants of the pool; for tests, O(N)."""
        self.blocks.check_integrity([sequence.blocks for sequence in self._by_id.values()])

    def _matcher(self, target_sequence: RequestTokens) -> GrammarMatcher | None:
        """Return the sequence's matcher; None without a grammar, or if the draft's tokenizer cannot express it."""
        if self._grammars is None:
            return None
        try:
            return self._grammars.matcher(target_sequence.request)
        except RequestError as error:
            logger.info("request %s: drafts are not constrained: %s", target_sequence.request_id, error.param)
            return None

    def _lacks_states(self, sequence: DraftSequence) -> bool:
        """True if as many other sequences have blocks as the slots of recurrent states allow."""
        most = self.blocks.max_sequences
        others = (each for each in self._by_id.values() if each is not sequence)
        return most is not None and sum(len(each.blocks.block_table) > 0 for each in others) >= most

    def _evict_idle(self) -> bool:
        """Release the blocks of the sequence that was drafted for longest ago, in an earlier round."""
        idle = [each for each in self._by_id.values() if each.last_round < self._round and each.blocks.block_table]
        if not idle:
            return False
        self._release(min(idle, key=lambda sequence: sequence.last_round))
        return True

    def _release(self, sequence: DraftSequence) -> None:
        sequence.unverified_ids = ()
        self.blocks.release(sequence.blocks)


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
        blocks: BlockManager,
        translation: Translation,
        *,
        max_tokens_per_round: int,
        grammars: GrammarCompiler | None = None,
        mask_id: int | None = None,
    ) -> None:
        """Take a loaded model and its KV pool.

        At most `max_tokens_per_round` prompt tokens are computed before a round's drafts. Without `grammars`, drafts
        ignore the grammars of requests.
        """
        self.runner = runner
        self.sequences = DraftSequences(blocks, translation, grammars)
        self.translation = translation
        self.mask_id = mask_id
        self.sampler = ChainSampler()
        self.tree_sampler = TreeSampler()
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
