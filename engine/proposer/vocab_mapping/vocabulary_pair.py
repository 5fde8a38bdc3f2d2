"""The vocabularies of target and draft: tests for one vocabulary, and the shared tokens of two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from engine.proposer.vocab_mapping.byte_vocabulary import ByteVocabulary

_MAX_PADDING_SHARE = 0.01  # of the vocabulary: most padding between two sizes of one tokenizer


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """A model's vocabulary size, and its ids that begin and end a text."""

    vocab_size: int
    bos_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VocabularyPair:
    """The tokens of two models; ids outside a model's logits are ignored."""

    target: ByteVocabulary
    draft: ByteVocabulary
    target_tokens: ModelTokens
    draft_tokens: ModelTokens

    def shared_ids(self) -> dict[int, int]:
        """Map draft ids to target ids with the same bytes or the same role, one to one."""
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
        """Map each control token of the target to the draft's tokens.

        It is the draft's token with the same name, or with the same role at the beginning or end of a text. For other
        control tokens, which chat templates use, it is the name as text.
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
        """Estimate the share of the target's text that consists of shared tokens, 0 to 1.

        The ids of a byte pair encoding follow the order of its merges, frequent tokens first. So frequencies are
        estimated by Zipf's law, with the id as the rank.
        """
        shared = set(self.shared_ids().values())
        spelled = sorted(self.target.id_of.values())
        # The first tokens of a BPE, mostly single bytes, are not its most frequent ones.
        weights = {token_id: 1.0 / (100 + rank) for rank, token_id in enumerate(spelled)}
        return sum(weights[token_id] for token_id in spelled if token_id in shared) / max(1e-9, sum(weights.values()))


def are_names_of_one(draft_names: Mapping[int, str], target_names: Mapping[int, str]) -> bool:
    """True if almost all ids have the same name; models of a family may differ by a few control tokens."""
    num_different = sum(draft_names.get(token_id) != name for token_id, name in target_names.items())
    num_different += len(draft_names.keys() - target_names.keys())
    return num_different <= _MAX_PADDING_SHARE * len(target_names)


def are_sizes_of_one(draft_size: int, target_size: int) -> bool:
    """True if two models with these numbers of logits may have one tokenizer."""
    return abs(draft_size - target_size) <= _MAX_PADDING_SHARE * target_size
