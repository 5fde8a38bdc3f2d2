"""Suffix decoding (arXiv:2411.04975): drafts the tokens that followed the text's end before, here or in other requests.

It needs no model and no GPU. Agents that quote files, repeat tool calls or repeat a loop get long drafts, other text
hardly any: the length of a draft depends on the acceptance of similar drafts. The draft is a function of the prefix and
of other texts, so q is one-hot for every verifier.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.batch.draft import NO_DRAFT, Draft, DraftSource
from engine.proposer.text_match.match_acceptance import MatchAcceptance
from engine.proposer.text_match.shared_texts import NoiseId, SharedTexts
from engine.proposer.text_match.suffix_index import MAX_MATCH, SuffixIndex
from engine.proposer.text_match.text_matcher import TextMatch
from engine.proposer.text_match.vote import VotedToken, continuation
from engine.sequence.draft_query import DraftQuery
from engine.sequence.request_tokens import RequestTokens
from protos.errors import ConfigError

_UNTAUGHT = MatchAcceptance()  # the prior alone: chances learned from a text of the same seed depend on its noise


@dataclass(slots=True)
class _IndexedSequence:
    """An open sequence, the index of its tokens, and its last match, made when it had `matched_at` tokens."""

    sequence: RequestTokens
    index: SuffixIndex
    matched: Seq[VotedToken] = ()
    matched_at: int = 0


class SuffixProposer:
    """Drafts from the request's own text and from its tenant's finished texts.

    A draft ends where its chance falls below `min_chance`, or below the sequence's `least_chance`, the price of a row.
    The first token below the price is also compared with the text, to learn from it. The cost of a step depends on its
    committed tokens, not the context. At most `max_shared_tokens` of finished requests are kept, at about 0.5 KB each.
    """

    source = DraftSource.SUFFIX

    def __init__(self, min_chance: float = 0.1, max_shared_tokens: int = 1 << 17) -> None:
        """Raises ConfigError if a value is out of range."""
        if not 0 < min_chance <= 1:
            raise ConfigError(f"min_chance is {min_chance}; use more than 0 and at most 1")
        if max_shared_tokens < 1:
            raise ConfigError(f"max_shared_tokens is {max_shared_tokens}; use at least 1")
        self._min_chance = min_chance
        self._chances = MatchAcceptance()
        self._shared = SharedTexts(max_shared_tokens)
        self._sequences: dict[str, _IndexedSequence] = {}

    def open(self, sequence: RequestTokens) -> None:
        """Index the prompt."""
        indexed = self._sequences[sequence.request_id] = _IndexedSequence(sequence, SuffixIndex())
        indexed.index.extend(sequence.token_ids)

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        """Return the matches as drafts."""
        matches = [self.match(query.sequence, query.max_draft_tokens) for query in queries]
        return [NO_DRAFT if match is None else Draft(match.token_ids, source=self.source) for match in matches]

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        """Learn from the last matches and index the new tokens."""
        for sequence in sequences:
            indexed = self._sequences.get(sequence.request_id)
            if indexed is not None:
                self._learn(indexed)
                indexed.index.extend(sequence.token_ids[indexed.index.end :])

    def close(self, request_id: str) -> None:
        """Add the output to the tenant's texts, with enough of the prompt for a match at the output's beginning."""
        indexed = self._sequences.pop(request_id, None)
        if indexed is None:
            return
        sequence = indexed.sequence
        if len(sequence.token_ids) > sequence.num_prompt_tokens:
            text = sequence.token_ids[max(0, sequence.num_prompt_tokens - MAX_MATCH) :]
            self._shared.add(sequence.request.cache_salt, _noise_of(sequence), text)

    def is_for(self, sequence: RequestTokens) -> bool:
        """True: any text may repeat."""
        return True

    def match(self, sequence: RequestTokens, max_tokens: int) -> TextMatch | None:
        """Return the continuation that wins the vote of the earlier occurrences of the text's end."""
        indexed = self._sequences.get(sequence.request_id)
        if indexed is None or max_tokens == 0:
            return None
        # Find the occurrences in the sequence and in the tenant's texts.
        suffix = sequence.token_ids[-MAX_MATCH:]
        occurrences = indexed.index.occurrences(suffix)
        if (shared := self._texts_for(sequence)) is not None:
            occurrences += shared.occurrences(suffix)
        # Extend the match while its chance suffices; the last token may be below the price, only to learn from it.
        chances = self._chances if sequence.is_matched else _UNTAUGHT
        matched: list[VotedToken] = []
        chance, num_worth = 1.0, 0
        for token in continuation(occurrences):
            chance *= chances.of(token.match_len, token.share)
            if matched and (chance < self._min_chance or len(matched) == max_tokens):
                break
            matched.append(token)
            if chance < sequence.least_chance:
                break
            num_worth += 1
        indexed.matched, indexed.matched_at = matched, len(sequence.token_ids)
        drafted = matched[:num_worth]
        return TextMatch(tuple(token.token_id for token in drafted), drafted[0].match_len) if drafted else None

    def _learn(self, indexed: _IndexedSequence) -> None:
        """Learn from the last match, drafted or not, up to its first wrong token."""
        committed = indexed.sequence.token_ids[indexed.matched_at :]
        for token, token_id in zip(indexed.matched, committed, strict=False):
            is_accepted = token.token_id == token_id
            self._chances.observe(token.match_len, token.share, is_accepted=is_accepted)
            if not is_accepted:
                break
        indexed.matched = ()

    def _texts_for(self, sequence: RequestTokens) -> SuffixIndex | None:
        """Return the tenant's texts, unless one was sampled with the verifier's noise.

        A text sampled with the same seed reveals the noise. That is harmless in coupled verification, where noise is
        public, but biases a ratio test.
        """
        tenant_id = sequence.request.cache_salt
        if not sequence.is_matched and self._shared.has_noise(tenant_id, _noise_of(sequence)):
            return None
        return self._shared.of(tenant_id)


def _noise_of(sequence: RequestTokens) -> NoiseId:
    return NoiseId(sequence.sampling.seed, sequence.request.sample_index)
