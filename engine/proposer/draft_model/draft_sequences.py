"""All sequences of a draft model, and which of them give up blocks when the pool is short."""

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

    A round is one call that drafts. Within it no sequence loses the blocks it has reserved; when the pool is short,
    those drafted for longest ago give up theirs.
    """

    def __init__(self, blocks: BlockManager, translation: Translation, grammars: GrammarCompiler | None = None) -> None:
        """`grammars` None leaves drafts free of the grammars of their sequences, at the price of acceptance."""
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
        """From here on, blocks reserved before may be given to others."""
        self._round += 1

    def sync(self, target_sequence: RequestTokens) -> DraftSequence | None:
        """Return the draft's copy, which now has all committed tokens; None for a sequence that is not open."""
        sequence = self._by_id.get(target_sequence.request_id)
        if sequence is not None:
            sequence.sync(target_sequence)
            sequence.last_round = self._round
        return sequence

    def rewind(self, request_id: str, num_tokens: int) -> None:
        """Behind its first `num_tokens` tokens a sequence is another one than it was when it was drafted for last.

        A keyed block is never written again: a sequence that parts from one gives up its blocks, to adopt anew those
        that it still agrees with.
        """
        sequence = self._by_id.get(request_id)
        if sequence is not None and not sequence.rewind(num_tokens, self.blocks.block_size):
            self._release(sequence)

    def reserve(self, sequence: DraftSequence, num_tokens: int) -> bool:
        """Slots for the first `num_tokens` positions, the cached prefix adopted; False if not even idling makes room.

        A sequence that finds no room gives its own up.
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
        """None also where the draft's own files do not do for the grammar; the target has the last word anyway."""
        if self._grammars is None:
            return None
        try:
            return self._grammars.matcher(target_sequence.request)
        except RequestError as error:
            logger.info("request %s: drafts are not constrained: %s", target_sequence.request_id, error.param)
            return None

    def _evict_idle(self) -> bool:
        """Release the blocks of the sequence drafted for longest ago, but of none in this round."""
        idle = [each for each in self._by_id.values() if each.last_round < self._round and each.blocks.block_table]
        if not idle:
            return False
        self._release(min(idle, key=lambda sequence: sequence.last_round))
        return True

    def _release(self, sequence: DraftSequence) -> None:
        sequence.unverified_ids = ()
        self.blocks.release(sequence.blocks)
