"""A draft model in this process: an independent, smaller language model with a KV pool of its own.

One round: every sequence catches up with its committed tokens in one flat pass, whose last rows give the first drafts;
then all take K - 1 steps of one row each, and every step's tokens are the next step's input. What a rejected draft
wrote is overwritten by the next round.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from engine.batch import ScheduledSequence
from engine.block_manager import BlockManager
from engine.config import CacheConfig, ModelConfig, SchedulerConfig
from engine.draft import NO_DRAFT, Draft
from engine.model_runner import ModelRunner
from engine.proposer.chain import Chain, ChainSampler
from engine.proposer.mirror import Mirror
from engine.sampler import Sampler
from engine.sequence import Sequence
from engine.span import Span
from protos.errors import ConfigError

logger = logging.getLogger(__name__)

_MAX_PADDING_SHARE = 0.01  # of the vocabulary: two sizes of one tokenizer differ by the padding of their embeddings
_MAX_STEPS_PER_PLAN = 16


class ModelProposer:
    """Drafts by running a model; implements `Proposer`.

    It never fails a round: a sequence whose prompt is not computed yet, that finds no blocks or that is longer than the
    draft's positions gets `NO_DRAFT`. When the pool is short, sequences drafted for longest ago give up their blocks.
    """

    def __init__(
        self,
        runner: ModelRunner,
        blocks: BlockManager,
        *,
        max_tokens_per_round: int,
        target_vocab_size: int | None = None,
    ) -> None:
        """`max_tokens_per_round` bounds the prompt tokens computed before a round's drafts.

        Raises:
            ConfigError: draft and target have different vocabularies.
        """
        self._runner = runner
        self._blocks = blocks
        self._max_tokens_per_round = max_tokens_per_round
        self._vocab_size = runner.vocab_size if target_vocab_size is None else target_vocab_size
        _check_vocab_sizes(runner.vocab_size, self._vocab_size)
        self._sampler = ChainSampler(Sampler())
        self._mirrors: dict[str, Mirror] = {}
        self._round = 0

    @classmethod
    def from_config(
        cls,
        model: ModelConfig,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        target_vocab_size: int | None = None,
    ) -> ModelProposer:
        """Load the draft and give it a pool. Without `target_vocab_size` the two vocabularies are taken to be equal.

        Raises:
            ConfigError: the model cannot be served, or does not fit the target.
        """
        runner = ModelRunner(model, cache)
        blocks = BlockManager(
            runner.num_blocks,
            runner.block_size,
            runner.model_version,
            enable_prefix_caching=cache.enable_prefix_caching,
        )
        return cls(
            runner, blocks, max_tokens_per_round=scheduler.max_tokens_per_step, target_vocab_size=target_vocab_size
        )

    @property
    def model_version(self) -> str:
        """Names the draft's weights."""
        return self._runner.model_version

    def open(self, sequence: Sequence) -> None:
        self._mirrors[sequence.request_id] = Mirror(sequence)

    def commit(self, sequences: Seq[Sequence]) -> None:
        """Nothing to do: `propose` compares its drafts with the committed tokens."""

    def close(self, request_id: str) -> None:
        mirror = self._mirrors.pop(request_id, None)
        if mirror is not None:
            self._blocks.release(mirror.sequence)

    @torch.inference_mode()
    def propose(self, shares: Seq[ScheduledSequence]) -> list[Draft]:
        self._round += 1
        chains = self._begin(shares)
        self._draft(self._catch_up(chains))
        drafts = {chain.mirror.sequence.request_id: chain.draft() for chain in chains}
        return [drafts.get(share.sequence.request_id, NO_DRAFT) for share in shares]

    def _begin(self, shares: Seq[ScheduledSequence]) -> list[Chain]:
        """A chain for every sequence that can have a draft now, with slots for all of it."""
        chains = []
        for share in shares:
            mirror = self._mirrors.get(share.sequence.request_id)
            if mirror is not None:
                mirror.follow(share.sequence)
                mirror.last_round = self._round
                chains.append(Chain(mirror, self._num_possible(share)))
        return [chain for chain in chains if chain.num_wanted > 0 and self._reserve(chain)]

    def _num_possible(self, share: ScheduledSequence) -> int:
        """K within the draft's positions: the last draft is never computed, so it needs none."""
        return min(share.max_draft_tokens, self._runner.max_model_len - len(share.sequence.token_ids) + 1)

    def _reserve(self, chain: Chain) -> bool:
        """Slots for the committed tokens and all drafts that are fed back; sequences that idle make room."""
        sequence = chain.mirror.sequence
        num_tokens = len(sequence.token_ids) + chain.num_wanted - 1
        if not sequence.block_table:
            self._blocks.adopt_prefix(sequence)
        while not self._blocks.reserve(sequence, num_tokens):
            if not self._evict_idle():
                self._blocks.release(sequence)
                return False
        return True

    def _evict_idle(self) -> bool:
        """Release the blocks of the sequence drafted for longest ago, but of none in this round."""
        idle = [m for m in self._mirrors.values() if m.last_round < self._round and m.sequence.block_table]
        if not idle:
            return False
        longest_idle = min(idle, key=lambda mirror: mirror.last_round)
        longest_idle.fed_ids = ()
        self._blocks.release(longest_idle.sequence)
        return True

    def _catch_up(self, chains: list[Chain]) -> list[Chain]:
        """Compute what is committed but not in the pool, within the budget; returns the chains that got a token.

        Those with the least to compute go first: a long prompt waits for its turn, not the others for it.
        """
        budget = self._max_tokens_per_round
        computed: list[Chain] = []
        spans: list[Span] = []
        for chain in sorted(chains, key=lambda chain: chain.mirror.num_missing_tokens):
            if budget > 0:
                spans.append(chain.mirror.next_span(budget))
                computed.append(chain)
                budget -= len(spans[-1].token_ids)
        if not spans:
            return []
        logits = self._align(self._runner.forward(spans))
        for chain, span in zip(computed, spans, strict=True):
            chain.mirror.sequence.num_computed_tokens = span.end
            self._blocks.publish(chain.mirror.sequence, span.end)
        ready = [chain for chain, span in zip(computed, spans, strict=True) if span.num_logits]
        if ready:
            self._sampler.extend(ready, logits)
        return ready

    def _draft(self, chains: list[Chain]) -> None:
        """Feed every chain its own last token until it is long enough."""
        while chains := [chain for chain in chains if chain.num_left > 0]:
            num_steps = min(_MAX_STEPS_PER_PLAN, *(chain.num_left for chain in chains))
            token_ids = torch.tensor([chain.token_ids[-1] for chain in chains])
            for step in self._runner.plan_steps([_step_span(chain, num_steps) for chain in chains]):
                step.input_ids.copy_(token_ids)
                token_ids = self._sampler.extend(chains, self._align(self._runner.run(step)))
            for chain in chains:
                chain.mirror.fed_ids = chain.token_ids[:-1]

    def _align(self, logits: Tensor) -> Tensor:
        """[R, V of the draft] -> [R, V of the target]: padding ids of either side cannot be drafted."""
        num_missing = self._vocab_size - logits.shape[1]
        if num_missing > 0:
            return torch.nn.functional.pad(logits, (0, num_missing), value=float("-inf"))
        return logits[:, : self._vocab_size]


def _step_span(chain: Chain, num_steps: int) -> Span:
    """The next `num_steps` drafts to be fed, the first of them known; their KV follows the committed tokens'."""
    sequence = chain.mirror.sequence
    start = len(sequence.token_ids) + len(chain.token_ids) - 1
    return Span([0] * num_steps, start, sequence.block_table, num_steps)


def _check_vocab_sizes(draft: int, target: int) -> None:
    if abs(draft - target) > _MAX_PADDING_SHARE * target:
        raise ConfigError(
            f"the draft's vocabulary has {draft} tokens and the target's {target}; their tokenizers must be the same"
        )
