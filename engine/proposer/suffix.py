"""Suffix decoding (arXiv:2411.04975): what most often followed the end of the text, here or in finished requests.

No model and no GPU. The longer the end that occurred before, the longer the draft: agents that quote files, repeat
tool calls or walk the same loop again are drafted for in long runs, other text hardly at all. The draft is a function
of the prefix and of other texts, so every verifier treats it as certain (q one-hot).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.batch import ScheduledSequence
from engine.draft import NO_DRAFT, Draft
from engine.proposer.shared_texts import NoiseId, SharedTexts
from engine.proposer.suffix_index import MAX_MATCH, Guess, SuffixIndex
from engine.row import GREEDY_BELOW
from engine.sequence import Sequence
from protos.errors import ConfigError
from protos.messages import VerifyMode


@dataclass(frozen=True, slots=True)
class _Followed:
    """An open sequence and the index of its prompt and output."""

    sequence: Sequence
    index: SuffixIndex


class SuffixProposer:
    """Drafts from the request's own text or from its tenant's finished ones, whichever is expected to yield more.

    A draft has at most `alpha` tokens per token of the match and goes on while a share of at least `tau` of the match's
    occurrences agrees. A step costs the tokens it committed, not the context; `max_shared_tokens` bounds what is kept
    of finished requests, at about 0.5 KB per token.
    """

    def __init__(self, alpha: float = 1.0, tau: float = 0.1, max_shared_tokens: int = 1 << 17) -> None:
        """Raises ConfigError for values out of range."""
        if not alpha > 0:
            raise ConfigError(f"alpha {alpha} lets no draft grow; use more than 0 draft tokens per matched token")
        if not 0 < tau <= 1:
            raise ConfigError(f"tau {tau} is no share of occurrences; use more than 0 and at most 1")
        if max_shared_tokens < 1:
            raise ConfigError(f"max_shared_tokens {max_shared_tokens} holds no text; use at least 1")
        self._alpha = alpha
        self._tau = tau
        self._shared = SharedTexts(max_shared_tokens)
        self._followed: dict[str, _Followed] = {}

    @property
    def num_shared_tokens(self) -> int:
        """Tokens of finished requests that are held, never more than `max_shared_tokens`."""
        return self._shared.num_tokens

    def open(self, sequence: Sequence) -> None:
        followed = self._followed[sequence.request_id] = _Followed(sequence, SuffixIndex())
        followed.index.extend(sequence.token_ids)

    def propose(self, shares: Seq[ScheduledSequence]) -> list[Draft]:
        guesses = [self.guess(share.sequence, share.max_draft_tokens) for share in shares]
        return [NO_DRAFT if guess is None else Draft(guess.token_ids) for guess in guesses]

    def commit(self, sequences: Seq[Sequence]) -> None:
        for sequence in sequences:
            followed = self._followed.get(sequence.request_id)
            if followed is not None:
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

    def is_for(self, sequence: Sequence) -> bool:
        """Any text may repeat."""
        return True

    def guess(self, sequence: Sequence, max_tokens: int) -> Guess | None:
        """The better of the guesses of the request's own text and of its tenant's, if there is one."""
        followed = self._followed.get(sequence.request_id)
        if followed is None or max_tokens == 0:
            return None
        suffix = sequence.token_ids[-MAX_MATCH:]
        guesses = [
            guess
            for index in (followed.index, self._texts_for(sequence))
            if index is not None and (guess := index.guess(suffix, max_tokens, self._alpha, self._tau)) is not None
        ]
        return max(guesses, key=_merit, default=None)

    def _texts_for(self, sequence: Sequence) -> SuffixIndex | None:
        """The tenant's texts, unless they know the noise that will verify the draft.

        A text sampled with the same seed tells what that noise is. With coupled verification noise is public; a ratio
        test would be biased by it.
        """
        tenant_id = sequence.request.cache_salt
        is_public = sequence.verify is VerifyMode.COUPLED or sequence.sampling.temperature < GREEDY_BELOW
        if not is_public and self._shared.know(tenant_id, _noise_of(sequence)):
            return None
        return self._shared.of(tenant_id)


def _noise_of(sequence: Sequence) -> NoiseId:
    return NoiseId(sequence.sampling.seed, sequence.request.sample_index)


def _merit(guess: Guess) -> tuple[float, int]:
    return guess.expected_tokens, guess.match_len
