"""A draft model in this process: a smaller language model with its own KV pool.

In a round the model first computes the missing committed tokens of all sequences in one batch. The last rows give the
first drafts. Then all sequences take K - 1 steps of one row each; every step's tokens are the next step's input. The
next round overwrites the KV of rejected drafts. In tree drafts the steps are the levels of the trees. A parallel model
(PARD, arXiv:2504.18583) computes masks after the committed tokens, and so all drafts in the first batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from engine.accounting.engine_stats import TranslationCounts
from engine.batch.draft import NO_DRAFT, Draft
from engine.config import MASK_KEYS, CacheConfig, ModelConfig, SchedulerConfig
from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.state_pool import StateSlots, check_draft
from engine.model.draft_heads.head import BlockLogits
from engine.model.loader import load_config, tokenizer_file
from engine.model.runner.model_runner import ModelRunner
from engine.proposer.chain import Chain
from engine.proposer.draft_model.ahead_drafter import FAN_OUT, AheadDrafter
from engine.proposer.draft_model.draft_model import DraftModel, DraftSequence
from engine.proposer.translation import SameVocabulary, Translation
from engine.proposer.tree import Blocks, Tree, tree_of
from engine.sampling.grammar_compiler import GrammarCompiler
from engine.sequence.batch import DraftQuery
from engine.sequence.sequence import RequestTokens
from protos.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _DraftPlan:
    """A sequence that can be drafted for, the longest draft, and the number of nodes if the draft may be a tree."""

    sequence: DraftSequence
    num_drafts: int
    num_nodes: int

    @property
    def request_id(self) -> str:
        return self.sequence.target_sequence.request_id

    def chain(self) -> Chain:
        sequence = self.sequence
        return sequence.chain(sequence.target_sequence.token_ids, sequence.blocks.block_table, self.num_drafts)


class ModelProposer:
    """Drafts by running a model; implements `Proposer`.

    A round never fails. A sequence gets `NO_DRAFT` if its prompt is not computed yet, if it finds no blocks, or if it
    is longer than the draft's positions. When the pool is full, sequences that were drafted for longest ago lose their
    blocks. Drafts of a model with recurrent layers are as long as the slots of its states allow.
    """

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self.sequences = model.sequences

    @classmethod
    def from_config(
        cls,
        model: ModelConfig,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        target_vocab_size: int | None = None,
        *,
        has_trees: bool = False,
        translation: Translation | None = None,
        tokenizer_path: str | None = None,
    ) -> ModelProposer:
        """Load the draft and allocate its pool.

        The target's logits have `target_vocab_size` columns, padding included, by default as many as the draft's.
        Without a `translation` both have one vocabulary. Grammars use the tokenizer of the model at `tokenizer_path`,
        by default the draft's.

        Raises:
            ConfigError: the model cannot be served, or does not fit the target.
        """
        # A device draws the target's ids, and only a host translates them.
        ids_end = (target_vocab_size or 1 << 30) if translation is None else 0
        runner = ModelRunner(replace(model, graphs=replace(model.graphs, draft_ids_end=ids_end)), cache)
        states = None
        if runner.num_states:
            check_draft(model.path, has_trees=has_trees)
            states = StateSlots(runner.num_states, scheduler.max_num_sequences)
            if runner.num_states < cache.num_states:
                logger.warning(
                    "the draft's memory holds %d of %d recurrent states, %d bytes each: at most %d sequences have "
                    "drafts at a time, and these may be short; raise cache.memory_gib",
                    *(runner.num_states, cache.num_states, runner.bytes_per_state, states.max_sequences),
                )
        vocab_size = runner.vocab_size if target_vocab_size is None else target_vocab_size
        draft = DraftModel(
            runner,
            BlockManager(runner.num_blocks, runner.block_size, runner.model_version, states=states),
            translation or SameVocabulary(runner.vocab_size, vocab_size),
            max_tokens_per_round=scheduler.max_tokens_per_step,
            grammars=GrammarCompiler(tokenizer_file(tokenizer_path or model.path), vocab_size, runner.eos_token_ids),
            mask_id=_mask_id(model.path, runner.vocab_size, translation),
        )
        return cls(draft)

    @property
    def counts(self) -> TranslationCounts:
        """Counts of tokens that were lost in translation to the target's vocabulary."""
        return self._model.translation.counts

    @property
    def model_version(self) -> str:
        """The version of the draft's weights."""
        return self._model.runner.model_version

    def ahead_drafter(self, fan_out: int = FAN_OUT) -> AheadDrafter:
        """Return a drafter ahead of verification with this model, for this proposer's open sequences."""
        return AheadDrafter(self._model, fan_out)

    def open(self, sequence: RequestTokens) -> None:
        self.sequences.open(sequence)

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        """Do nothing: `propose` compares its drafts with the committed tokens."""

    def rewind(self, request_id: str, num_tokens: int) -> None:
        """Drop a sequence's computed tokens after the first `num_tokens`, since they have changed."""
        self.sequences.rewind(request_id, num_tokens)

    def close(self, request_id: str) -> None:
        self.sequences.close(request_id)

    @torch.inference_mode()
    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        """Prefill the newly committed tokens, then grow all drafts together."""
        # Reserve slots, and prefill.
        self.sequences.begin_round()
        plans = {plan.request_id: plan for query in queries if (plan := self._begin(query))}
        jobs, logits = self._model.prefill([(plan.sequence, self._masks(plan)) for plan in plans.values()])
        ready = [plans[sequence.target_sequence.request_id] for sequence, _ in jobs]
        if self._model.mask_id is not None:
            ready = [replace(plan, num_drafts=len(masks) + 1) for plan, (_, masks) in zip(ready, jobs, strict=True)]
            drafts = self._draft_blocks(ready, logits)
            return [drafts.get(query.sequence.request_id, NO_DRAFT) for query in queries]
        # Grow the chains, then the trees.
        branching = [row for row, plan in enumerate(ready) if plan.num_nodes > 0]
        roots = logits[branching] if branching else logits[:0]  # a copy: the chains' passes overwrite them
        drafts = self._draft_chains(ready, logits)
        drafts |= self._draft_trees([ready[row] for row in branching], roots)
        return [drafts.get(query.sequence.request_id, NO_DRAFT) for query in queries]

    def _masks(self, plan: _DraftPlan) -> Seq[int]:
        mask_id = self._model.mask_id
        return () if mask_id is None else [mask_id] * (plan.num_drafts - 1)

    def _draft_blocks(self, ready: Seq[_DraftPlan], logits: Tensor) -> dict[str, Draft]:
        """Return the drafts by request id; `logits` has a row for every draft of every plan in `ready`."""
        grown: dict[str, Draft] = {}
        firsts = [0, *accumulate(plan.num_drafts for plan in ready)]
        for is_tree in (False, True):
            chosen = [row for row, plan in enumerate(ready) if (plan.num_nodes > 0) is is_tree]
            num_drafts = [ready[row].num_drafts for row in chosen]
            rows = [firsts[row] + depth for row in chosen for depth in range(ready[row].num_drafts)]
            blocks = Blocks(_rows_of(logits[rows]), num_drafts)
            if is_tree:
                trees = [self._tree(ready[row]) for row in chosen]
                blocks.branch(trees, self._model.tree_sampler)
                grown |= {ready[row].request_id: tree.draft() for row, tree in zip(chosen, trees, strict=True)}
            else:
                chains = [ready[row].chain() for row in chosen]
                blocks.grow(chains, self._model.sampler)
                grown |= {ready[row].request_id: chain.draft() for row, chain in zip(chosen, chains, strict=True)}
        return grown

    def _draft_chains(self, ready: Seq[_DraftPlan], logits: Tensor) -> dict[str, Draft]:
        """Return the chains by request id; `logits [B, V]` has a row for every plan in `ready`."""
        rows = [row for row, plan in enumerate(ready) if plan.num_nodes == 0]
        chains = [self._with_states(ready[row]).chain() for row in rows]
        if chains:
            token_ids = self._model.sampler.extend(chains, logits if len(rows) == len(ready) else logits[rows])
            self._model.grow(chains, last_ids=token_ids)
        for row, chain in zip(rows, chains, strict=True):
            ready[row].sequence.unverified_ids = self._model.translation.to_draft(chain.token_ids[:-1])
        return {ready[row].request_id: chain.draft() for row, chain in zip(rows, chains, strict=True)}

    def _with_states(self, plan: _DraftPlan) -> _DraftPlan:
        """Return the plan with as many drafts as the states after its inputs have slots."""
        num_inputs = self.sequences.blocks.plan_draft_states(plan.sequence.blocks, plan.num_drafts - 1)
        return replace(plan, num_drafts=num_inputs + 1)

    def _draft_trees(self, plans: Seq[_DraftPlan], logits: Tensor) -> dict[str, Draft]:
        """Return the trees by request id, grown from their roots' logits, `[B, V]`.

        Their KV is not kept: the next round computes the accepted tokens again.
        """
        trees = [self._tree(plan) for plan in plans]
        if trees:
            self._model.branch(trees, logits)
        return {plan.request_id: tree.draft() for plan, tree in zip(plans, trees, strict=True)}

    def _begin(self, query: DraftQuery) -> _DraftPlan | None:
        """Reserve slots for a query's committed tokens and for all drafts that are inputs; None if that fails."""
        sequence = self.sequences.sync(query.sequence)
        if sequence is None or not sequence.blocks.token_ids:
            return None
        num_read = len(sequence.blocks.token_ids)
        # Within the draft's positions: the last draft is never computed, so it needs none.
        num_drafts = min(query.max_draft_tokens, self._model.runner.max_model_len - num_read + 1)
        if num_drafts < 1 or not self.sequences.reserve(sequence, num_read + num_drafts - 1):
            return None
        return _DraftPlan(sequence, num_drafts, query.max_tree_nodes)

    def _tree(self, plan: _DraftPlan) -> Tree:
        copy, sequence = plan.sequence, plan.sequence.target_sequence
        return tree_of(sequence, copy.blocks, plan.num_nodes, plan.num_drafts, copy.matcher)


def _rows_of(logits: Tensor) -> BlockLogits:
    return lambda rows, _: logits[rows]


def _mask_id(path: str, vocab_size: int, translation: Translation | None) -> int | None:
    """Return the id of a parallel draft's mask; None for other models.

    Raises:
        ConfigError: the model has no such token, or another vocabulary than the target.
    """
    config = load_config(path)
    found = next((value for name in MASK_KEYS if (value := getattr(config, name, None)) is not None), None)
    if found is None:
        return None
    if not isinstance(found, int) or not 0 <= found < vocab_size:
        raise ConfigError(f"{path!r} has the mask token {found!r} in config.json, and its ids are below {vocab_size}")
    if translation is not None and not translation.is_identity:
        raise ConfigError(
            f"{path!r} drafts in parallel and has another tokenizer than the target; choose one with the target's"
        )
    return found
