"""Suffix decoding (arXiv:2411.04975): drafts the tokens that followed the text's end before, here or in other requests.

It needs no model and no GPU. Agents that quote files, repeat tool calls or repeat a loop get long drafts, other text
hardly any: the length of a draft depends on the acceptance of similar drafts. The draft is a function of the prefix and
of other texts, so q is one-hot for every verifier.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import takewhile

from engine.batch.draft import NO_DRAFT, Draft
from engine.proposer.text_match.suffix_index import MAX_MATCH, SEPARATOR, Occurrence, SuffixIndex
from engine.proposer.text_match.text_matcher import TextMatch
from engine.sequence.batch import DraftQuery
from engine.sequence.sequence import RequestTokens
from protos.messages import SpeculationMethod

NoiseId = tuple[int, int]  # seed and sample: two sequences with one id draw the same numbers at each position
_NUM_KINDS = 5  # matches of 1, 2 to 3, 4 to 7, 8 to 15, and 16 tokens or more


class MatchAcceptance:
    """Chances by length of the match, over all texts.

    The prior of a match of n tokens is `n / (n + 2)`, between the measured chances of prose and agents. The chance of a
    token is proportional to its share of the vote, so acceptance is learned per vote. Agents repeat themselves exactly
    and prose hardly ever, so a match of two tokens means more in an agent's text.
    """

    def __init__(self) -> None:
        self._voted = [0.0] * (_NUM_KINDS + 1)
        self._accepted = [0.0] * (_NUM_KINDS + 1)

    def of(self, match_len: int, share: float) -> float:
        """Return the chance that a token with this share of the vote is accepted after all tokens before it."""
        kind = _kind_of(match_len)
        prior, weight = match_len / (match_len + 2), 8.0  # in votes
        return min(1.0, share * (self._accepted[kind] + weight * prior) / (self._voted[kind] + weight))

    def observe(self, match_len: int, share: float, *, is_accepted: bool) -> None:
        """Record one token; old tokens fade."""
        kind, fade = _kind_of(match_len), 1.0 - 1.0 / 200.0  # 200 votes of a kind count
        self._voted[kind] = fade * self._voted[kind] + share
        self._accepted[kind] = fade * self._accepted[kind] + is_accepted


def _kind_of(match_len: int) -> int:
    return min(match_len.bit_length(), _NUM_KINDS)


# The prior alone: chances learned from a text of the same seed depend on its noise.
_UNTAUGHT = MatchAcceptance()


@dataclass(frozen=True, slots=True)
class VotedToken:
    """A token of the continuation, its share of the vote, and the longest matching context of its voters.

    The context includes the tokens before it in the continuation.
    """

    token_id: int
    share: float
    match_len: int


def continuation(occurrences: Seq[Occurrence]) -> Iterator[VotedToken]:
    """Yield the tokens that win the vote, one after the other, until no occurrence has a continuation.

    An occurrence with more matching context outweighs one with less; with equal context the later one wins. An
    occurrence that differs from a drafted token loses its vote.
    """
    # Factors per matching token, and per later occurrence: texts tend to repeat recent tokens.
    voters = [(4.0**each.match_len * 0.7**each.rank, each) for each in occurrences]
    drafted_ids: list[int] = []
    while voters:
        # Each occurrence votes for its next token.
        followers = [place.follower(drafted_ids) for _, place in voters]
        votes: dict[int, float] = {}
        for (weight, _), token_id in zip(voters, followers, strict=True):
            votes[token_id] = votes.get(token_id, 0.0) + weight
        total = sum(votes.values())
        votes.pop(SEPARATOR, None)
        if not votes:
            return
        # Only the voters of the winner vote again.
        winner = max(votes, key=votes.__getitem__)
        voters = [voter for voter, token_id in zip(voters, followers, strict=True) if token_id == winner]
        match_len = max(place.match_len for _, place in voters) + len(drafted_ids)
        yield VotedToken(winner, votes[winner] / total, match_len)
        drafted_ids.append(winner)


@dataclass(slots=True)
class _IndexedSequence:
    """An open sequence, the index of its tokens, and its last match, made when it had `matched_at` tokens."""

    sequence: RequestTokens
    index: SuffixIndex
    matched: Seq[VotedToken] = ()
    matched_at: int = 0


class SuffixProposer:
    """Drafts from the request's own text and from its tenant's finished texts.

    A draft ends where its chance falls below `min_chance`, and has the length whose chances exceed the sequence's
    `row_prices` most. Tokens that were not worth their rows are also compared with the text, to learn from them. The
    cost of a step depends on its committed tokens, not the context. At most `max_shared_tokens` of finished requests
    are kept, at about 0.5 KB each.
    """

    source: str = SpeculationMethod.SUFFIX

    def __init__(self, min_chance: float = 0.1, max_shared_tokens: int = 1 << 17) -> None:
        self._min_chance = min_chance
        self._chances = MatchAcceptance()
        self._shared = SharedTexts(max_shared_tokens)
        self._sequences: dict[str, _IndexedSequence] = {}

    def open(self, sequence: RequestTokens) -> None:
        indexed = self._sequences[sequence.request_id] = _IndexedSequence(sequence, SuffixIndex())
        indexed.index.extend(sequence.token_ids)

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        matches = [self.match(query.sequence, query.max_draft_tokens) for query in queries]
        return [NO_DRAFT if match is None else Draft(match[0], source=self.source) for match in matches]

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
        # Extend the match while its chance suffices, and keep the length that is worth most.
        chances = self._chances if sequence.is_matched else _UNTAUGHT
        matched: list[VotedToken] = []
        prices, chance, worth, most_worth, num_worth = sequence.row_prices or (0.0,), 1.0, 0.0, 0.0, 0
        for token in continuation(occurrences):
            chance *= chances.of(token.match_len, token.share)
            if matched and (chance < self._min_chance or len(matched) == max_tokens):
                break
            later_prices = prices[min(len(matched), len(prices) - 1) :]
            matched.append(token)
            worth += chance - later_prices[0]
            if worth > most_worth:
                most_worth, num_worth = worth, len(matched)
            if chance < min(later_prices):
                break
        indexed.matched, indexed.matched_at = matched, len(sequence.token_ids)
        drafted = matched[:num_worth]
        return (tuple(token.token_id for token in drafted), drafted[0].match_len) if drafted else None

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
    return sequence.sampling.seed, sequence.request.sample_index


# A tenant's texts, and the end of the last text of each noise, oldest first.
_TenantTexts = tuple[SuffixIndex, dict[NoiseId, int]]


class SharedTexts:
    """The latest texts of each tenant, at most `max_tokens` in all.

    A tenant above the limit loses its own oldest tokens. If all tenants together are above it, the tenants that were
    used longest ago lose everything first. Tenants have separate indices: no draft comes from another tenant's text.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._tenants: OrderedDict[str, _TenantTexts] = OrderedDict()  # the least recently used first
        self.num_tokens = 0

    def add(self, tenant_id: str, noise_id: NoiseId, token_ids: Seq[int]) -> None:
        """Add a finished text."""
        index, noise_ends = self._tenants.setdefault(tenant_id, (SuffixIndex(self._max_tokens), {}))
        self._tenants.move_to_end(tenant_id)
        num_before = len(index)
        index.extend(token_ids)
        index.end_text()
        noise_ends.pop(noise_id, None)
        noise_ends[noise_id] = index.end
        for forgotten in list(takewhile(lambda each: noise_ends[each] <= index.start, noise_ends)):
            del noise_ends[forgotten]
        self.num_tokens += len(index) - num_before
        self._evict()

    def of(self, tenant_id: str) -> SuffixIndex | None:
        """Return the tenant's texts; None if it has no texts."""
        tenant = self._tenants.get(tenant_id)
        if tenant is None:
            return None
        self._tenants.move_to_end(tenant_id)
        return tenant[0]

    def has_noise(self, tenant_id: str, noise_id: NoiseId) -> bool:
        """True if the tenant has a text that was sampled with this noise."""
        tenant = self._tenants.get(tenant_id)
        return tenant is not None and noise_id in tenant[1]

    def _evict(self) -> None:
        while self.num_tokens > self._max_tokens:
            _, (index, _) = self._tenants.popitem(last=False)
            self.num_tokens -= len(index)
