"""The client's own prediction as the draft (OpenAI's predicted outputs): edits repeat most of their input."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from engine.proposer.text_match.text_matcher import Guess
from engine.sequence.request_tokens import RequestTokens
from protos.predicted_text import PredictedText


@dataclass(slots=True)
class _Followed:
    text: PredictedText
    num_read: int
    num_in_step: int = 0  # tokens since the text last strayed from the prediction


class PredictionGuesser:
    """Guesses what the request's prediction says next, as long as the text follows it; a `TextMatcher`.

    The prediction must not know the noise that will verify it: with verification other than `coupled`, a text that was
    sampled with the same seed would bias the output (the ingress refuses a prediction beside a seed there).
    """

    def __init__(self) -> None:
        self._followed: dict[str, _Followed] = {}

    def is_for(self, sequence: RequestTokens) -> bool:
        return bool(sequence.request.prediction_token_ids)

    def open(self, sequence: RequestTokens) -> None:
        followed = _Followed(PredictedText(sequence.request.prediction_token_ids), sequence.num_prompt_tokens)
        self._followed[sequence.request_id] = followed

    def commit(self, sequences: Seq[RequestTokens]) -> None:
        for sequence in sequences:
            followed = self._followed.get(sequence.request_id)
            if followed is not None:
                _read(followed, sequence.token_ids[followed.num_read :])

    def close(self, request_id: str) -> None:
        self._followed.pop(request_id, None)

    def guess(self, sequence: RequestTokens, max_tokens: int) -> Guess | None:
        followed = self._followed.get(sequence.request_id)
        token_ids = followed.text.next(max_tokens) if followed is not None else ()
        if followed is None or not token_ids:
            return None
        return Guess(token_ids, followed.num_in_step)


def _read(followed: _Followed, token_ids: Seq[int]) -> None:
    followed.num_read += len(token_ids)
    for token_id in token_ids:
        before = followed.text.position
        followed.text.read((token_id,))
        is_in_step = before is not None and followed.text.position == before + 1
        followed.num_in_step = followed.num_in_step + 1 if is_in_step else 0
