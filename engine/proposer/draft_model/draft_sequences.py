"""All sequences of a draft model, and who of them gives up blocks when the pool is short."""

from __future__ import annotations

import logging

from engine.kv_cache.block_manager import BlockManager
from engine.proposer.draft_model.draft_sequence import DraftSequence
from engine.proposer.vocab_mapping.translation import Translation
from engine.sampling.grammar import GrammarMatcher
from engine.sampling.grammar_compiler import GrammarCompiler
from engine.sequence.sequence import Sequence
from protos.errors import RequestError

logger = logging.getLogger(__name__)


class DraftSequences:
    """The mirrors over one pool of blocks.

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

    def open(self, sequence: Sequence) -> None:
        self._by_id[sequence.request_id] = DraftSequence(sequence, self._translation, self._matcher(sequence))

    def close(self, request_id: str) -> None:
        mirror = self._by_id.pop(request_id, None)
        if mirror is not None:
            self.blocks.release(mirror.sequence)

    def begin_round(self) -> None:
        """From here on, blocks reserved before may be given to others."""
        self._round += 1

    def follow(self, sequence: Sequence) -> DraftSequence | None:
        """The sequence's mirror, which now knows all committed tokens; None for a sequence that is not open."""
        mirror = self._by_id.get(sequence.request_id)
        if mirror is not None:
            mirror.follow(sequence)
            mirror.last_round = self._round
        return mirror

    def rewind(self, request_id: str, num_tokens: int) -> None:
        """Behind its first `num_tokens` tokens a sequence is another one than it was when it was drafted for last.

        A named block is never written again: a sequence that parts from one gives up its blocks, to adopt anew those
        that it still agrees with.
        """
        mirror = self._by_id.get(request_id)
        if mirror is not None and not mirror.rewind(num_tokens, self.blocks.block_size):
            self._release(mirror)

    def reserve(self, mirror: DraftSequence, num_tokens: int) -> bool:
        """Slots for the first `num_tokens` positions, the cached prefix adopted; False if not even idling makes room.

        A sequence that finds no room gives its own up.
        """
        sequence = mirror.sequence
        if not sequence.block_table:
            self.blocks.adopt_prefix(sequence)
        while not self.blocks.reserve(sequence, num_tokens):
            if not self._evict_idle():
                self._release(mirror)
                return False
        return True

    def check_integrity(self) -> None:
        """Assert the invariants of the pool; for tests, O(N)."""
        self.blocks.check_integrity([mirror.sequence for mirror in self._by_id.values()])

    def _matcher(self, sequence: Sequence) -> GrammarMatcher | None:
        """None also where the draft's own files do not do for the grammar; the target has the last word anyway."""
        if self._grammars is None:
            return None
        try:
            return self._grammars.matcher(sequence.request)
        except RequestError as error:
            logger.info("request %s: drafts are not constrained: %s", sequence.request_id, error)
            return None

    def _evict_idle(self) -> bool:
        """Release the blocks of the sequence drafted for longest ago, but of none in this round."""
        idle = [m for m in self._by_id.values() if m.last_round < self._round and m.sequence.block_table]
        if not idle:
            return False
        self._release(min(idle, key=lambda mirror: mirror.last_round))
        return True

    def _release(self, mirror: DraftSequence) -> None:
        mirror.fed_ids = ()
        self.blocks.release(mirror.sequence)
