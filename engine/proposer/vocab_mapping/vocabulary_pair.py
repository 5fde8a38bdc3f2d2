"""The target's vocabulary beside the draft's: tests for being one, and otherwise the tokens that they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.proposer.vocab_mapping.byte_vocabulary import ByteVocabulary

_MAX_PADDING_SHARE = 0.01  # of the vocabulary: two sizes of one tokenizer differ by the padding of their embeddings
_ZIPF_SHIFT = 100  # the first tokens of a BPE, single bytes for the most part, are not its most frequent ones


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """A model's own tokens: the columns of its logits, and the ids that begin and end a text."""

    vocab_size: int
    bos_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VocabularyPair:
    """Two models' tokens; ids beyond a model's logits are left out of everything."""

    target: ByteVocabulary
    draft: ByteVocabulary
    target_tokens: ModelTokens
    draft_tokens: ModelTokens

    def shared_ids(self) -> dict[int, int]:
        """Return the target's id of each draft id that spells the same bytes, or plays the same role; one to one."""
        ids = {
            draft_id: self.target.id_of[data]
            for data, draft_id in self.draft.id_of.items()
            if data in self.target.id_of
        }
        for target_id, draft_ids in self.special_ids().items():
            if len(draft_ids) == 1 and draft_ids[0] in self.draft.special_ids and draft_ids[0] not in ids:
                ids[draft_ids[0]] = target_id
        sizes = self.draft_tokens.vocab_size, self.target_tokens.vocab_size
        return {theirs: ours for theirs, ours in ids.items() if theirs < sizes[0] and ours < sizes[1]}

    def special_ids(self) -> Mapping[int, tuple[int, ...]]:
        """Return what the draft reads for each control token of the target.

        It is the token of that name, or that begins or ends a text as it does; for others, which a chat template
        writes, their names as text.
        """
        by_name = {self.draft.names[token_id]: token_id for token_id in self.draft.special_ids}
        read: dict[int, tuple[int, ...]] = {}
        for role in ("bos_token_ids", "eos_token_ids"):
            theirs: tuple[int, ...] = getattr(self.draft_tokens, role)
            read |= dict.fromkeys(getattr(self.target_tokens, role), theirs[:1])
        for token_id in sorted(self.target.special_ids):
            name = self.target.names[token_id]
            if name in by_name:
                read[token_id] = (by_name[name],)
            elif token_id not in read:
                read[token_id] = tuple(self.draft.encode(name))
        return read

    def coverage(self) -> float:
        """Return the share of the target's text, roughly, that is written in shared tokens, 0 to 1.

        Tokens of a byte pair encoding are numbered in the order in which they were merged, the frequent ones first; so
        frequencies are taken to fall as Zipf's law says, with the rank that the id is.
        """
        shared = set(self.shared_ids().values())
        spelled = sorted(self.target.id_of.values())
        weights = {token_id: 1.0 / (_ZIPF_SHIFT + rank) for rank, token_id in enumerate(spelled)}
        return sum(weights[token_id] for token_id in spelled if token_id in shared) / max(1e-9, sum(weights.values()))


def are_names_of_one(draft_names: Mapping[int, str], target_names: Mapping[int, str]) -> bool:
    """True if next to all ids mean the same in both: sizes of a family differ by a few control tokens at most."""
    num_different = sum(draft_names.get(token_id) != name for token_id, name in target_names.items())
    num_different += len(draft_names.keys() - target_names.keys())
    return num_different <= _MAX_PADDING_SHARE * len(target_names)


def are_sizes_of_one(draft_size: int, target_size: int) -> bool:
    """True if two models with so many logits may have one tokenizer."""
    return abs(draft_size - target_size) <= _MAX_PADDING_SHARE * target_size
