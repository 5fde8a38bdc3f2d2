"""Suffix decoding (arXiv:2411.04975): what followed the end of the text before, here or in finished requests.

No model and no GPU. Agents that quote files, repeat tool calls or walk the same loop again are drafted for in long
runs, other text hardly at all: how far a draft goes depends on how far drafts like it have stood. The draft is a
function of the prefix and of other texts, so every verifier treats it as certain (q one-hot).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.draft import NO_DRAFT, Draft
from engine.proposer.text_match.match_acceptance import MatchAcceptance
from engine.proposer.text_match.shared_texts import NoiseId, SharedTexts
from engine.proposer.text_match.suffix_index import MAX_MATCH, SuffixIndex
from engine.proposer.text_match.text_matcher import Guess
from engine.proposer.text_match.vote import VotedToken, continuation
from engine.sequence.draft_query import DraftQuery
from engine.sequence.request_tokens import RequestTokens
from protos.errors import ConfigError

_UNTAUGHT = MatchAcceptance()  # what was learned from a text of the same seed would tell of its noise


@dataclass(slots=True)
class _Followed:
    """An open sequence, the index of its prompt and output, and what was guessed at a length of it."""

    sequence: RequestTokens
    index: SuffixIndex
    guessed: Seq[VotedToken] = ()
    guessed_at: int = 0


class SuffixProposer:
    """Drafts from the request's own text and from its tenant's finished ones.

    A draft goes on while it has a chance of `min_chance` to stand so far; where anything is known, it has a token at
    least, from which more is learned. A step costs the tokens it committed, not the context; `max_shared_tokens` bounds
    what is kept of finished requests, at about 0.5 KB per token.
    """

    def __init__(self, min_chance: float = 0.1, max_shared_tokens: int = 1 << 17) -> None:
        """Raises ConfigError for values out of range."""
        if not 0 < min_chance <= 1:
            raise ConfigError(f"min_chance {min_chance} is no chance; use more than 0 and at most 1")
        if max_shared_tokens < 1:
            raise ConfigError(f"max_shared_tokens {max_shared_tokens} holds no text; use at least 1")
        self._min_chance = min_chance
        self._chances = MatchAcceptance()
        self._shared = SharedTexts(max_shared_tokens)
        self._followed: dict[str, _Followed] = {}

    @property
    def num_shared_tokens(self) -> int:
        """Tokens of finished requests that are held, never more than `max_shared_tokens`."""
        return self._shared.num_tokens

    def open(self, sequence: RequestTokens) -> None:
        followed = self._followed[sequence.request_id] = _Followed(sequence, SuffixIndex())
        followed.index.extend(sequence.token_ids)

    def propose(self, queries: Seq[DraftQuery]) -> list[Draft]:
        guesses = [self.guess(query.sequence, query.max_draft_tokens) for query in queries]
        return [NO_DRAFT if guess is None else Draft(guess.token_ids) for guess in guesses]

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        for sequence in sequences:
            followed = self._followed.get(sequence.request_id)
            if followed is not None:
                self._learn(followed)
                followed.index.extend(sequence.token_ids[followed.index.end :])

    def close(self, request_id: str) -> None:
        """The output, and of the prompt what a match at its beginning needs, becomes the tenant's."""
        followed = self._followed.pop(request_id, None)
        if followed is None:
            return
        sequence = followed.sequence
        if len(sequence.token_ids) > sequence.num_prompt_tokens:
            text = sequence.token_ids[max(0, sequence.num_prompt_tokens - MAX_MATCH) :]
            self._shared.add(sequence.request.cache_salt, _noise_of(sequence), text)

    def is_for(self, sequence: RequestTokens) -> bool:
        """Any text may repeat."""
        return True

    def guess(self, sequence: RequestTokens, max_tokens: int) -> Guess | None:
        """What the occurrences of the text's end agree on, in its own text and in its tenant's, if there are any."""
        followed = self._followed.get(sequence.request_id)
        if followed is None or max_tokens == 0:
            return None
        suffix = sequence.token_ids[-MAX_MATCH:]
        occurrences = followed.index.occurrences(suffix)
        if (shared := self._texts_for(sequence)) is not None:
            occurrences += shared.occurrences(suffix)
        chances = self._chances if sequence.is_matched else _UNTAUGHT
        guessed: list[VotedToken] = []
        chance = 1.0
        for token in continuation(occurrences):
            chance *= chances.of(token.match_len, token.share)
            if guessed and (chance < self._min_chance or len(guessed) == max_tokens):
                break
            guessed.append(token)
        followed.guessed, followed.guessed_at = guessed, len(sequence.token_ids)
        return Guess(tuple(token.token_id for token in guessed), guessed[0].match_len) if guessed else None

    def _learn(self, followed: _Followed) -> None:
        """What became of the last guess, drafted or not, up to its first wrong token."""
        committed = followed.sequence.token_ids[followed.guessed_at :]
        for token, token_id in zip(followed.guessed, committed, strict=False):
            stood = token.token_id == token_id
            self._chances.observe(token.match_len, token.share, stood=stood)
            if not stood:
                break
        followed.guessed = ()

    def _texts_for(self, sequence: RequestTokens) -> SuffixIndex | None:
        """The tenant's texts, unless they know the noise that will verify the draft.

        A text sampled with the same seed tells what that noise is. With coupled verification noise is public; a ratio
        test would be biased by it.
        """
        tenant_id = sequence.request.cache_salt
        if not sequence.is_matched and self._shared.know(tenant_id, _noise_of(sequence)):
            return None
        return self._shared.of(tenant_id)


def _noise_of(sequence: RequestTokens) -> NoiseId:
    return NoiseId(sequence.sampling.seed, sequence.request.sample_index)
