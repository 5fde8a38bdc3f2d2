"""All sequences of a draft model, and their eviction when the pool is full."""

from __future__ import annotations

import logging

from engine.kv_cache.block_manager import BlockManager
from engine.proposer.draft_model.draft_sequence import DraftSequence
from engine.proposer.vocab_mapping.translation import Translation
from engine.sampling.grammar import GrammarMatcher
from engine.sampling.grammar_compiler import GrammarCompiler
from engine.sequence.request_tokens import RequestTokens
from protos.errors import RequestError

logger = logging.getLogger(__name__)


class DraftSequences:
    """The draft's copies of the open sequences, over one pool of blocks.

    A round is one call that drafts. Within a round no sequence loses reserved blocks. When the pool is full, the
    sequences that were drafted for longest ago lose their blocks.
    """

    def __init__(self, blocks: BlockManager, translation: Translation, grammars: GrammarCompiler | None = None) -> None:
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
        while not self.blocks.reserve(sequence.blocks, num_tokens):
            if not self._evict_idle():
                self._release(sequence)
                return False
        return True

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
