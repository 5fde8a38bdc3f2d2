"""A sequence whose reasoning steps the draft may write, the draft's copy of it, and the target's score of a step."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch
from tokenizers import Tokenizer
from torch import Tensor

from engine.config import ScorerKind, StepConfig
from engine.sequence.batch import UnscheduledQuery
from engine.sequence.sequence import DraftRule, RequestTokens, Sequence, SequenceStatus
from protos.errors import ConfigError
from protos.messages import MAX_STEP_SCORE, SpeculationMethod, SpeculationParams, StepStats


class StepText:
    """Searches decoded tokens, special tokens included."""

    def __init__(self, tokenizer: Tokenizer, config: StepConfig) -> None:
        self._tokenizer = tokenizer
        self._think = config.think

    def is_thinking(self, token_ids: Seq[int], num_new: int, was_thinking: bool) -> bool:
        """True if the text ends between the markers; the last marker in its `num_new` last tokens decides."""
        if self._think is None:
            return True
        # Finds markers of up to 16 tokens that two passes commit in part.
        text = self._text(token_ids[max(0, len(token_ids) - num_new - 16) :])
        begin, end = (text.rfind(marker) for marker in self._think)
        return was_thinking if begin == end else begin > end  # equal if both are absent

    def find_end(
        self, token_ids: Seq[int], num_searched: int, stop_token_ids: Collection[int] = ()
    ) -> tuple[int, bool] | None:
        """Count the tokens of the step that `token_ids` begin with; None if the step is incomplete.

        The flag is True if the reasoning ends right after it.

        The first `num_searched` tokens have no end. Tokens that end the reasoning or the output do not belong to a
        step: the target decides about them.
        """
        for number in range(num_searched + 1, len(token_ids) + 1):
            if token_ids[number - 1] in stop_token_ids:
                return number - 1, True
            text = self._text(token_ids[:number])
            if self._think is not None and self._think[1] in text:
                return self._num_before(token_ids, text.index(self._think[1])), True
            if "\n\n" in text.lstrip():
                return number, False
        return None

    def _num_before(self, token_ids: Seq[int], num_characters: int) -> int:
        """Count the tokens whose text ends before a character."""
        fitting = (n for n in range(len(token_ids), 0, -1) if len(self._text(token_ids[:n])) <= num_characters)
        return next(fitting, 0)

    def _text(self, token_ids: Seq[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=False)


class Phase(Enum):
    """The state of a step. Every step begins and ends in TARGET or ACCEPTED.

    TARGET: the target writes a step, with exact drafts. DRAFT: the draft writes, and the target does not schedule the
    sequence. SCORE: the step is complete, and the next pass scores it. ACCEPTED: that pass has committed it.
    """

    TARGET = auto()
    DRAFT = auto()
    SCORE = auto()
    ACCEPTED = auto()


class ReasoningSequence:
    """A sequence and the reasoning step that the draft writes for it.

    `sequence` belongs to the target. `draft_sequence` is the draft's copy: the committed tokens and the step so far. A
    draft cannot remove tokens, so a rejected step is followed by a new copy under a new id. The current step begins at
    `base_len`. The first `num_seen` committed tokens have been searched for its end; `is_at_boundary` is True once the
    end is found.
    """

    def __init__(self, sequence: Sequence, threshold: float) -> None:
        self.sequence = sequence
        self.threshold = threshold
        self.phase = Phase.TARGET
        self.base_len = self.num_seen = len(sequence.token_ids)
        self.is_thinking = False
        self.is_at_boundary = True
        self.is_ending = False  # the draft would end the reasoning after the submitted step
        self.is_proposed = False  # the step is in the current pass
        self._planned: tuple[int, int] | None = None  # drafts and nodes of an exact pass, while a step takes their room
        self._num_draft_sequences = 0
        self.draft_sequence = self.new_draft_sequence()

    @property
    def step_ids(self) -> Seq[int]:
        """The current step's tokens, as far as the draft has written them."""
        return self.draft_sequence.token_ids[self.base_len :]

    @property
    def is_stale(self) -> bool:
        """True if the sequence has grown past the tokens that its step continues."""
        is_drafted = self.phase in (Phase.DRAFT, Phase.SCORE)
        return is_drafted and len(self.sequence.token_ids) != self.base_len

    @property
    def is_ready(self) -> bool:
        """True if the target decodes: it has output, and only the last token is not computed."""
        sequence = self.sequence
        is_running = sequence.status is SequenceStatus.RUNNING and not sequence.is_fetching
        return is_running and sequence.num_uncomputed_tokens == 1 and sequence.num_output_tokens > 0

    @property
    def stats(self) -> StepStats:
        return self.sequence.step_stats or StepStats()

    def hold(self) -> None:
        """Let the draft write a step after the committed tokens; the engine does not schedule the sequence then."""
        self.phase = Phase.DRAFT
        self.base_len = len(self.sequence.token_ids)
        self.draft_sequence.token_ids += self.sequence.token_ids[len(self.draft_sequence.token_ids) :]
        self.sequence.is_held = True

    def submit(self, num_tokens: int, num_suffix_tokens: int, *, is_ending: bool) -> None:
        """Submit the draft's first `num_tokens` tokens as a step, which the next pass scores."""
        self.phase = Phase.SCORE
        self.is_ending = is_ending
        del self.draft_sequence.token_ids[self.base_len + num_tokens :]
        sequence = self.sequence
        sequence.is_held = False
        self._planned = sequence.draft_allowance, sequence.node_allowance
        sequence.draft_allowance, sequence.node_allowance = num_tokens + num_suffix_tokens, 0

    def release(self) -> None:
        """Let the target write the next step."""
        self.phase = Phase.TARGET
        self.base_len = len(self.sequence.token_ids)
        self.is_at_boundary = False
        self.sequence.is_held = False
        self._restore()

    def _restore(self) -> None:
        if self._planned is not None:
            self.sequence.draft_allowance, self.sequence.node_allowance = self._planned
            self._planned = None

    def record(self, *, is_accepted: bool) -> None:
        """Count the current step as accepted or rejected; the next pass has the drafts that were planned before it."""
        self._restore()
        num_tokens = len(self.step_ids) if is_accepted else 0
        self.sequence.step_stats = self.stats + StepStats(1, int(is_accepted), num_tokens)

    def new_draft_sequence(self) -> RequestTokens:
        """Replace the draft sequence by a new one of the committed tokens, and return it."""
        request = self.sequence.request
        self._num_draft_sequences += 1
        self.draft_sequence = RequestTokens(
            replace(
                request,
                request_id=f"{request.request_id}/step-{self._num_draft_sequences}",
                output_token_ids=tuple(self.sequence.token_ids[self.sequence.num_prompt_tokens :]),
                speculation=SpeculationParams(),
                prediction_token_ids=(),
            ),
            DraftRule(self.sequence.num_draft_tokens, self.sequence.verify, SpeculationMethod.MODEL),
        )
        self.draft_sequence.drafts_ahead = False  # its next tokens wait for no verdict
        return self.draft_sequence

    def query(self, num_tokens: int) -> UnscheduledQuery:
        """Return a query for up to `num_tokens` more tokens of the step."""
        return UnscheduledQuery(self.draft_sequence, num_tokens)


@dataclass(frozen=True, slots=True)
class StepScorer:
    """Scores steps. The pass computes `suffix_ids` after the step; they are never committed.

    Without `digit_ids` a step is scored by the likelihood of its tokens: 9 times the geometric mean of p(x) / max p. It
    works with any model, and a step that a greedy target would have written scores 9. With them, `suffix_ids` ask the
    target for a digit (arXiv:2504.07891). The score is the expectation over the ten digits, so an undecided target does
    not give a random score.
    """

    suffix_ids: tuple[int, ...] = ()
    digit_ids: tuple[int, ...] = ()

    def score(self, logits: Tensor, step_ids: Seq[int]) -> float:
        """Return a score in [0, 9].

        Args:
            logits: `[S + len(suffix_ids) + 1, V] float32`; row i follows the step's first i tokens.
            step_ids: The S tokens of the step.
        """
        if self.digit_ids:
            row = logits[len(step_ids) + len(self.suffix_ids)]  # [V]
            probs = row[list(self.digit_ids)].double().softmax(dim=0)  # [10]
            return float(probs @ torch.arange(10, dtype=torch.float64, device=probs.device))
        rows = logits[: len(step_ids)]  # [S, V]
        chosen = rows.gather(1, torch.tensor(step_ids, device=rows.device)[:, None])[:, 0]  # [S]
        return MAX_STEP_SCORE * float((chosen - rows.amax(dim=1)).mean().exp())


def make_scorer(config: StepConfig, tokenizer: Tokenizer) -> StepScorer:
    """Return the scorer of a deployment.

    Raises:
        ConfigError: the tokenizer writes a digit in several tokens, or the rating prompt has no tokens.
    """
    if config.judge is ScorerKind.LIKELIHOOD:
        return StepScorer()
    suffix_ids = tuple(tokenizer.encode(config.rating_prompt, add_special_tokens=False).ids)
    digit_ids = [tokenizer.encode(str(digit), add_special_tokens=False).ids for digit in range(10)]
    wrong = next((digit for digit, ids in enumerate(digit_ids) if len(ids) != 1), None)
    if wrong is not None:
        raise ConfigError(
            f"`speculation.steps.judge` is 'rating', but the target's tokenizer writes the digit {wrong} in "
            f"{len(digit_ids[wrong])} tokens instead of 1; set it to 'likelihood'"
        )
    if not suffix_ids:
        raise ConfigError("the tokenizer has no tokens for the question; set `speculation.steps.judge` to 'likelihood'")
    return StepScorer(suffix_ids, tuple(ids[0] for ids in digit_ids))
